#include "core/backend/cuda/ops/graphs.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <optional>
#include <type_traits>

#include "core/backend/cuda/cudnn/plans.h"
#include "core/backend/cuda/kernels/attention.h"
#include "core/backend/cuda/kernels/walk.h"
#include "core/backend/cuda/ops/kernels.h"
#include "core/backend/cuda/ops/pointwise.h"
#include "core/backend/cuda/ops/windows.h"
#include "core/base/deterministic.h"
#include "core/base/log.h"
#include "core/tensor/shape.h"

namespace tessera::cuda {
namespace {

using dnn::ConvKind;

constexpr int64_t kAlignment = 16;  // in bytes, that engines want

bool is_16_bit(DType t) { return t == kF16 || t == kBF16; }
int dnn_type(DType t) { return t == kF32 ? dnn::kFloat : t == kF16 ? dnn::kHalf : dnn::kBFloat16; }

int32_t alignment_of(const Tensor& t) {
  const auto at = reinterpret_cast<uintptr_t>(t.device_data());
  return int32_t(uintptr_t(1) << std::countr_zero(at | uintptr_t(kAlignment)));
}

template <class Problem>
std::string_view bytes_of(const Problem& p) {
  static_assert(std::is_trivially_copyable_v<Problem>);
  return {reinterpret_cast<const char*>(&p), sizeof(p)};
}

// ---- convolutions

bool lies_last(const Tensor& t) { return is_channels_last(t.shape(), t.strides()); }

// What does not lie channels-last is copied.
int32_t aligned(const Tensor& t) { return lies_last(t) ? alignment_of(t) : int32_t(kAlignment); }

dnn::ConvProblem problem_of(ConvKind kind, const ConvAttributes& a, const Tensor& x,
                            const Tensor& w, const Tensor& y) {
  dnn::ConvProblem p;
  p.kind = kind, p.type = dnn_type(x.dtype());
  p.spatial = std::max(a.spatial(), 2);
  // A single dim is the last of two, of which the first has one place.
  const int missing = p.spatial - a.spatial();
  const std::pair<int64_t*, const Tensor*> all[] = {{p.x, &x}, {p.w, &w}, {p.y, &y}};
  for (const auto& [extents, t] : all) {
    std::fill(extents, extents + p.spatial + 2, 1);
    extents[0] = t->size(0), extents[1] = t->size(1);
    for (int d = 0; d < a.spatial(); ++d) extents[missing + 2 + d] = t->size(2 + d);
  }
  std::fill(p.stride, p.stride + p.spatial, 1), std::fill(p.dilation, p.dilation + p.spatial, 1);
  for (int d = 0; d < a.spatial(); ++d) {
    const int to = missing + d;
    p.begin[to] = a.window.pad_begin[d], p.end[to] = a.window.pad_end[d];
    p.stride[to] = a.window.stride[d], p.dilation[to] = a.window.dilation[d];
  }
  p.aligned_x = aligned(x), p.aligned_w = aligned(w), p.aligned_y = aligned(y);
  return p;
}

std::string described(ConvKind kind, const ConvAttributes& a, const Tensor& x, const Tensor& w) {
  constexpr const char* kNames[] = {"the convolution", "a gradient by the input of the convolution",
                                    "a gradient by the weight of the convolution"};
  return fmt::format("{} {} of {} with {}, stride {}, padding {} and {}, dilation {}, groups {}",
                     kNames[size_t(kind)], name_of(x.dtype()), to_string(x.shape()),
                     to_string(w.shape()), to_string(a.window.stride),
                     to_string(a.window.pad_begin), to_string(a.window.pad_end),
                     to_string(a.window.dilation), a.window.groups);
}

// One number for each channel, as the library reads them.
Tensor numbers_of(const Tensor& t, const Stream& stream) {
  if (t.dtype() == kF32 && t.is_contiguous() && alignment_of(t) == kAlignment) return t;
  const Tensor copy = empty(t.shape(), kF32, t.device());
  convert(t, copy, stream);
  return copy;
}

// What a convolution's graph has beside it.
struct Beside {
  std::span<const Tensor> sums = {};          // of the result's channels: two, or none
  const BatchNormAttributes* norm = nullptr;  // that y is the result of
  const GradSums* gradient = nullptr;         // that x is the h of
  // Of the norm mean, var, ..; of the gradient mean, x, ..
  std::span<const Tensor> operands = {};
};

bool run_conv(ConvKind kind, const ConvAttributes& a, const Tensor& x, const Tensor& w,
              const Tensor& y, const Beside& beside, const FunctionRef<void()>* own,
              const Stream& stream) {
  const DType t = x.dtype();
  if ((t != kF32 && !is_16_bit(t)) || !graphs_in_use()) return false;
  dnn::ConvProblem p = problem_of(kind, a, x, w, y);
  p.statistics = !beside.sums.empty();
  if (const GradSums* s = beside.gradient) p.relu = s->y.defined(), p.residual = s->other.defined();
  if (const BatchNormAttributes* n = beside.norm) {
    p.normalises = 1, p.eps = n->eps;
    p.weight = n->form.weight, p.bias = n->form.bias, p.relu = n->form.relu;
    p.residual = n->form.residual;
  }
  for (const Tensor& t : beside.operands)
    if (t.ndim() > 1) p.aligned_beside = std::min(p.aligned_beside, aligned(t));
  if (!takes(p)) return false;
  const auto make = [&](const CudnnFunctions& f) { return graph_of(f, p); };
  const auto describe = [&] {
    return described(kind, a, x, w) + (p.statistics   ? ", with sums of its channels"
                                       : p.normalises ? ", with batch-norm of its result"
                                                      : "");
  };
  const dnn::Demands demands{.deterministic = deterministic_algorithms(),
                             .full_precision = t == kF32};
  Tensor in_x, in_w, in_y;  // as the library reads and writes them
  Tensors operands;
  const auto bind = [&] {
    const auto lying = [&](const Tensor& t, ConvKind writes) {
      if (kind != writes) return channels_last(t, stream);
      if (lies_last(t)) return t;
      return empty(Meta{t.shape(), channels_last_strides(t.shape()), t.dtype(), t.device()});
    };
    in_x = lying(x, ConvKind::kGradInput), in_w = lying(w, ConvKind::kGradWeight);
    in_y = lying(y, ConvKind::kForward);
    using V = dnn::ConvValues;
    std::vector<dnn::Binding> all{
        {V::kX, in_x.device_data()}, {V::kW, in_w.device_data()}, {V::kY, in_y.device_data()}};
    if (p.statistics)
      all.push_back({V::kSum, beside.sums[0].device_data()}),
          all.push_back({V::kSquares, beside.sums[1].device_data()});
    for (const Tensor& t : beside.operands) {
      operands.push_back(t.ndim() == 1 ? numbers_of(t, stream) : channels_last(t, stream));
      all.push_back({V::mean(p) + int64_t(operands.size()) - 1, operands.back().device_data()});
    }
    return all;
  };
  if (!run_graph({bytes_of(p), demands, make, describe, own}, bind, stream)) return false;
  if (kind == ConvKind::kGradWeight && !lies_last(w)) convert(in_w, w, stream);
  return true;
}

// ---- attention

// Whether the gradient that is summed in one piece, and so takes scratch of the size of the scores,
// still fits.
constexpr int64_t kMostScratch = int64_t(1) << 30;

// Whether engines read and write the [B, H, places, width] `t` where it lies: its rows are dense
// and begin at multiples of 16 bytes.
bool lies_in_rows(const Tensor& t) {
  for (int d = 0; d < 3; ++d) {
    const int64_t bytes = t.strides()[d] * int64_t(size_of(t.dtype()));
    if (t.size(d) != 1 && (bytes == 0 || bytes % kAlignment != 0)) return false;
  }
  return t.strides()[3] == 1 && alignment_of(t) == kAlignment;
}
Tensor copy_of(const Tensor& t, const Stream& stream) {
  const Tensor copy = empty(t.shape(), t.dtype(), t.device());
  convert(t, copy, stream);
  return copy;
}
// What engines read for the operand `t`, and write for `result`.
Tensor in_rows(const Tensor& t, const Stream& stream) {
  return lies_in_rows(t) ? t : copy_of(t, stream);
}
Tensor place_for(const Tensor& result) {
  return lies_in_rows(result) ? result : empty(result.shape(), result.dtype(), result.device());
}
// The strides of either. No engine reads that of a dim of one place.
dnn::HeadStrides strides_of_heads(const Tensor& t) {
  Strides s = contiguous_strides(t.shape());
  if (lies_in_rows(t))
    for (int d = 0; d < 3; ++d)
      if (t.size(d) != 1) s[d] = t.strides()[d];
  return {s[0], s[1], s[2]};
}

// `in` has q, k and v, and ends with the mask where there is one.
dnn::AttentionProblem problem_of(const AttentionAttributes& a, std::span<const Tensor> in,
                                 const Tensor& out, bool gradient) {
  const Tensor &q = in[0], &k = in[1], &v = in[2];
  dnn::AttentionProblem p;
  p.type = dnn_type(q.dtype()), p.causal = a.causal, p.gradient = gradient;
  p.one_sum = gradient && deterministic_algorithms();
  p.batch = q.size(0), p.heads = q.size(1), p.queries = q.size(2), p.keys = v.size(2);
  p.width = q.size(3), p.value_width = v.size(3), p.scale = a.scale;
  p.q = strides_of_heads(q), p.k = strides_of_heads(k), p.v = strides_of_heads(v);
  p.out = strides_of_heads(out);
  if (a.has_mask) std::copy_n(in.back().shape().begin(), 4, p.mask);
  return p;
}

// The mask as the library adds it, and the first key of each of its lines that is attended to.
struct Bias {
  Tensor values, first;
  Bias(const Tensor& mask, DType t, const Stream& stream) {
    Tensor from = mask;
    if (mask.dtype() != kBool && mask.dtype() != kF32)
      from = empty(mask.shape(), kF32, mask.device()), convert(mask, from, stream);
    values = empty(mask.shape(), kF32, mask.device());
    const Shape& s = mask.shape();
    first = empty({s[0], s[1], s[2]}, kI32, mask.device());
    AttentionBiasCall c{};
    c.mask = from.device_data(), c.is_bool = from.dtype() == kBool, c.keys = int(s[3]);
    c.bias = static_cast<float*>(values.device_data());
    c.first = static_cast<int*>(first.device_data());
    for (int d = 0; d < 4; ++d) c.steps[d] = from.strides()[d];
    for (int d = 0; d < 3; ++d) c.extents[d] = unsigned(s[d]);
    c.lines = countable(first.numel(), "lines of a mask");
    launch(attention_mask_instance(t).name, "bias", cover(int64_t(c.lines) * 32, 256), stream, c);
  }
  // Makes zeros of rows that attend to no key.
  void blank(const dnn::AttentionProblem& p, const Tensor& out, const Tensor& lse,
             const Stream& stream) const {
    AttentionBlankCall c{};
    c.first = static_cast<const int*>(first.device_data());
    c.out = {out.device_data(), out.strides()[0], out.strides()[1], out.strides()[2]};
    c.lse = static_cast<float*>(lse.device_data());
    for (int d = 0; d < 3; ++d) c.steps[d] = first.size(d) == 1 ? 0 : first.strides()[d];
    c.rows = lse.numel(), c.heads = int(p.heads), c.queries = int(p.queries);
    c.keys = int(p.keys), c.width = int(p.value_width), c.causal = p.causal;
    launch(attention_mask_instance(out.dtype()).name, "blank", cover(c.rows, 256), stream, c);
  }
};

bool takes(const CudnnFunctions& f, const dnn::AttentionProblem& p, DType t) {
  const int64_t scores = p.batch * p.heads * p.queries * p.keys;
  if (!is_16_bit(t) || scores == 0 || p.width * p.value_width == 0 || !dnn::takes(p, f.version) ||
      (p.one_sum && 2 * scores > kMostScratch))
    return false;
  if (!dnn::has_faulty_attention(f.version)) return true;
  static std::atomic<bool> said = false;
  if (!said.exchange(true))
    logging::warn(
        "cuda: Tessera's own kernels compute attention: that of cuDNN 9.10.{} is known to "
        "be wrong; 9.10.2 is not",
        f.version % 100);
  return false;
}

bool run(const dnn::AttentionProblem& p, DType t, FunctionRef<std::vector<dnn::Binding>()> bind,
         const Stream& stream) {
  const auto make = [&](const CudnnFunctions& f) { return graph_of(f, p); };
  const auto describe = [&] {
    return fmt::format("{}attention {} of q [{}, {}, {}, {}] with {} keys, values of {}{}",
                       p.gradient ? "the gradient of " : "", name_of(t), p.batch, p.heads,
                       p.queries, p.width, p.keys, p.value_width,
                       (p.causal ? ", causal" : "") +
                           (p.mask[0] ? fmt::format(", with a mask [{}]", fmt::join(p.mask, ", "))
                                      : std::string()));
  };
  const dnn::Demands demands{.deterministic = deterministic_algorithms()};
  return run_graph({bytes_of(p), demands, make, describe}, bind, stream);
}

}  // namespace

bool library_conv(ConvKind kind, const ConvAttributes& a, const Tensor& x, const Tensor& w,
                  const Tensor& y, FunctionRef<void()> own, const Stream& stream) {
  const auto alone = [&] {
    const OwnGraphs scope;
    own();
  };
  const FunctionRef<void()> other = alone;
  return run_conv(kind, a, x, w, y, {}, x.dtype() == kF32 ? &other : nullptr, stream);
}

bool library_conv_norm(const ConvNormAttributes& a, std::span<const Tensor> in, const Tensor& y,
                       FunctionRef<void()> apart, const Stream& stream) {
  return run_conv(ConvKind::kForward, a.conv, in[0], in[1], y,
                  {.norm = &a.norm, .operands = in.subspan(2)}, &apart, stream);
}

bool library_conv_sums(const ConvAttributes& a, const Tensor& x, const Tensor& w, const Tensor& y,
                       const Tensor& sum, const Tensor& squares, FunctionRef<void()> apart,
                       const Stream& stream) {
  const Tensor sums[] = {sum, squares};
  return is_16_bit(x.dtype()) &&
         run_conv(ConvKind::kForward, a, x, w, y, {.sums = sums}, &apart, stream);
}

bool library_conv_grad_sums(const ConvAttributes& a, const Tensor& g, const Tensor& w,
                            const GradSums& s, const Tensor& sum, const Tensor& products,
                            FunctionRef<void()> apart, const Stream& stream) {
  const Tensor sums[] = {sum, products};
  Tensors operands;
  for (const Tensor* t : {&s.mean, &s.x, &s.y, &s.other})
    if (t->defined()) operands.push_back(*t);
  return is_16_bit(g.dtype()) &&
         run_conv(ConvKind::kGradInput, a, s.h, w, g,
                  {.sums = sums, .gradient = &s, .operands = operands}, &apart, stream);
}

bool library_attention(const AttentionAttributes& a, std::span<const Tensor> in,
                       std::span<const Tensor> results, const Stream& stream) {
  if (a.drops()) return false;
  using V = dnn::AttentionValues;
  const Tensor &out = results[0], &lse = results[1];
  const DType t = out.dtype();
  const CudnnFunctions* f = graphs_in_use();
  const dnn::AttentionProblem p = problem_of(a, in, out, false);
  if (!f || !takes(*f, p, t)) return false;
  Tensor rows[3], made;
  std::optional<Bias> bias;
  const auto bind = [&] {
    for (size_t i = 0; i < 3; ++i) rows[i] = in_rows(in[i], stream);
    made = place_for(out);
    std::vector<dnn::Binding> all{{V::kQ, rows[0].device_data()},
                                  {V::kK, rows[1].device_data()},
                                  {V::kV, rows[2].device_data()},
                                  {V::kOut, made.device_data()},
                                  {V::kLse, lse.device_data()}};
    if (a.has_mask) bias.emplace(in.back(), t, stream);
    if (bias) all.push_back({V::mask(p), bias->values.device_data()});
    return all;
  };
  if (!run(p, t, bind, stream)) return false;
  if (!made.is_same(out)) convert(made, out, stream);
  if (bias) bias->blank(p, out, lse, stream);
  return true;
}

bool library_attention_grad(const AttentionAttributes& a, std::span<const Tensor> in,
                            std::span<const Tensor> results, const Stream& stream) {
  if (a.drops()) return false;
  using V = dnn::AttentionValues;
  const Tensor& q = in[1];
  const CudnnFunctions* f = graphs_in_use();
  dnn::AttentionProblem p = problem_of(a, in.subspan(1), in[4], true);
  p.g = strides_of_heads(in[0]);
  p.dq = strides_of_heads(results[0]), p.dk = strides_of_heads(results[1]);
  p.dv = strides_of_heads(results[2]);
  if (!f || !takes(*f, p, q.dtype())) return false;
  Tensors operands, made, scratch;
  const auto bind = [&] {
    std::vector<dnn::Binding> all;
    const auto add = [&](int64_t value, const Tensor& t, Tensors& to) {
      to.push_back(t), all.push_back({value, t.device_data()});
    };
    constexpr int64_t kOperands[] = {V::kG, V::kQ, V::kK, V::kV, V::kOut};
    for (size_t i = 0; i < std::size(kOperands); ++i)
      add(kOperands[i], in_rows(in[i], stream), operands);
    add(V::kLse, alignment_of(in[5]) == kAlignment ? in[5] : copy_of(in[5], stream), operands);
    constexpr int64_t kResults[] = {V::kDq, V::kDk, V::kDv};
    for (size_t i = 0; i < std::size(kResults); ++i) add(kResults[i], place_for(results[i]), made);
    add(V::kRows, empty({p.batch, p.heads, p.queries}, kF32, stream.device), scratch);
    if (!p.one_sum) add(V::kWideDq, empty(q.shape(), kF32, stream.device), scratch);
    if (a.has_mask) add(V::mask(p), Bias(in.back(), q.dtype(), stream).values, scratch);
    return all;
  };
  if (!run(p, q.dtype(), bind, stream)) return false;
  for (size_t i = 0; i < results.size(); ++i)
    if (!made[i].is_same(results[i])) convert(made[i], results[i], stream);
  return true;
}

}  // namespace tessera::cuda
