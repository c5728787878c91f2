// Contractions: letters are sorted into batch, m, n and k, neighbours that lie densely behind each
// other are merged, and what remains is a batch of products of strided matrices. Operands are
// copied only where several summed letters cannot be walked as one. cuBLASLt computes it where it
// is found and can (products.h), else our own kernels do.
#include "core/backend/cuda/copy.h"
#include "core/backend/cuda/kernels/matmul.h"
#include "core/backend/cuda/ops/kernels.h"
#include "core/backend/cuda/ops/pointwise.h"
#include "core/backend/cuda/ops/products.h"
#include "core/backend/cuda/ops/reduce.h"
#include "core/backend/cuda/ops/register.h"
#include "core/backend/cuda/runtime.h"
#include "core/base/error.h"
#include "core/dispatch/call.h"
#include "core/ops/contract_epilogues.h"
#include "core/primitive/primitive_of.h"

namespace tessera::cuda {
namespace {

// One loop with its strides in the result and the operands; 0 where one lacks it.
struct Loop {
  int64_t extent = 1, c = 0, a = 0, b = 0;
};
using Loops = SmallVector<Loop, 8>;

struct Nest {
  Loops batch, m, n, k;
};

bool has(const std::string& word, char letter) { return word.find(letter) != std::string::npos; }

int64_t stride_of(const std::string& word, char letter, const Tensor& t) {
  const size_t d = word.find(letter);
  return d == std::string::npos ? 0 : t.strides()[int(d)];
}

void push_merged(Loops& loops, Loop l) {
  if (l.extent == 1) return;
  if (!loops.empty()) {
    Loop& o = loops.back();
    if (o.a == l.a * l.extent && o.b == l.b * l.extent && o.c == l.c * l.extent) {
      o = {o.extent * l.extent, l.c, l.a, l.b};
      return;
    }
  }
  loops.push_back(l);
}

Nest make_nest(const ContractAttributes& s, const Tensor& a, const Tensor& b, const Tensor& c) {
  Nest nest;
  for (size_t i = 0; i < s.out.size(); ++i) {
    const char l = s.out[i];
    const bool in_a = has(s.a, l), in_b = has(s.b, l);
    push_merged(
        in_a && in_b ? nest.batch
        : in_a       ? nest.m
                     : nest.n,
        {c.shape()[int(i)], c.strides()[int(i)], stride_of(s.a, l, a), stride_of(s.b, l, b)});
  }
  for (size_t i = 0; i < s.a.size(); ++i)
    if (!has(s.out, s.a[i]))
      push_merged(nest.k, {a.shape()[int(i)], 0, a.strides()[int(i)], stride_of(s.b, s.a[i], b)});
  return nest;
}

// The loop of `loops` that products walk, the longest; the others become loops of the batch.
Loop keep_one(Loops& loops, Loops& batch) {
  if (loops.empty()) return {};
  size_t best = 0;
  for (size_t i = 1; i < loops.size(); ++i)
    if (loops[i].extent > loops[best].extent) best = i;
  for (size_t i = 0; i < loops.size(); ++i)
    if (i != best) batch.push_back(loops[i]);
  return loops[best];
}

// A dense copy of `t`, whose letters are `word`, in which the summed letters come last and in the
// order of `summed`; `word` then says so.
Tensor with_summed_last(const Tensor& t, std::string& word, const std::string& summed,
                        const Stream& stream) {
  std::string order;
  for (char l : word)
    if (!has(summed, l)) order += l;
  order += summed;
  Shape shape;
  Strides strides;
  for (char l : order) {
    const int d = int(word.find(l));
    shape.push_back(t.shape()[d]), strides.push_back(t.strides()[d]);
  }
  const Tensor copy = empty(shape, t.dtype(), t.device());
  convert(Tensor({shape, strides, t.dtype(), t.device()}, t.storage(), t.offset()), copy, stream);
  word = order;
  return copy;
}

// out = a b; whether the epilogue, where there is one, was computed too. Where it was not and adds
// to `out`, nothing was computed.
bool multiply(ContractAttributes s, Tensor a, Tensor b, const Tensor& out, const Epilogue& epilogue,
              const Stream& stream) {
  if (out.numel() == 0) return !epilogue;
  Nest nest = make_nest(s, a, b, out);
  if (nest.k.size() > 1) {
    std::string summed;
    for (char l : s.a)
      if (!has(s.out, l)) summed += l;
    a = with_summed_last(a, s.a, summed, stream), b = with_summed_last(b, s.b, summed, stream);
    nest = make_nest(s, a, b, out);
  }
  const bool one_row = nest.n.size() <= 1;  // else a row is not the last dim, which a bias has
  const Loop m = keep_one(nest.m, nest.batch), n = keep_one(nest.n, nest.batch);
  const bool nothing_summed = a.numel() == 0 || b.numel() == 0;
  const Loop k = nest.k.empty() ? Loop{} : nest.k[0];
  SmallVector<int64_t, 8> extents, in_c, in_a, in_b;
  for (const Loop& l : nest.batch)
    extents.push_back(l.extent), in_c.push_back(l.c), in_a.push_back(l.a), in_b.push_back(l.b);
  auto list = [](const auto& v) { return std::span<const int64_t>(v.begin(), v.size()); };
  const DType t = a.dtype(), to = out.dtype();
  const int64_t summed = nothing_summed ? 0 : k.extent;
  const Matrices left{a.device_data(), m.a, k.a, list(in_a)},
      right{b.device_data(), k.b, n.b, list(in_b)};
  const auto by_library = [&](const Epilogue& e) {
    return library_product({t, t, to}, list(extents), m.extent, n.extent, summed,
                           {out.device_data(), m.c, n.c, list(in_c)}, left, right, stream, e);
  };
  if (!s.leaves) {  // a sum in the order of leaves is our own kernel's alone
    if (epilogue && (one_row || epilogue.kind == Epilogue::kAdd) && by_library(epilogue))
      return true;
    if (epilogue.kind == Epilogue::kAdd) return false;
    if (by_library({})) return false;
  }
  auto by_kernels = [&](const Matrices& c, const MatmulSum& sum) {
    for (const MatmulLaunch& l :
         matmul_launches(t, list(extents), m.extent, n.extent, summed, c, left, right, sum))
      launch(l.instance, "matmul", l.geometry, stream, l.call);
    return false;
  };
  const int64_t parts =
      s.leaves ? 1
               : matmul_parts(t, out.numel() / (m.extent * n.extent), m.extent, n.extent, summed);
  if (parts == 1) {
    const int64_t leaves = s.leaves ? s.leaves_of(summed) : 0;
    return by_kernels({out.device_data(), m.c, n.c, list(in_c)},
                      {.leaves = leaves, .wide = to != t});
  }
  // Parts of the sum, dense and in f32 at least, are joined and put where the result has them.
  Loops loops = nest.batch;
  for (const Loop& l : {m, n})
    if (l.extent > 1) loops.push_back(l);
  Shape shape;
  Strides strides;
  for (const Loop& l : loops) shape.push_back(l.extent), strides.push_back(l.c);
  const Strides dense = contiguous_strides(shape);
  const int64_t size = out.numel();
  const DType wide = t == kF64 ? kF64 : kF32;
  const Tensor partial = empty({parts, size}, wide, stream.device);
  by_kernels({partial.device_data(), n.extent, 1, {dense.begin(), nest.batch.size()}},
             {.parts = parts, .part_stride = size, .wide = true});
  if (strides == dense) {
    reduce_to("sum", partial, out, 1, parts, size, stream);
    return false;
  }
  const Tensor sum = empty(shape, wide, stream.device);
  reduce_to("sum", partial, sum, 1, parts, size, stream);
  convert(sum, Tensor({shape, strides, to, stream.device}, out.storage(), out.offset()), stream);
  return false;
}

void run_contract(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
                  Workspace, const Stream& stream) {
  multiply(attributes_of<ContractAttributes>(prim), in[0], in[1], out[0], {}, stream);
}

void plan_third_dense(const Primitive&, std::span<const Tensor>, std::span<Meta>, Plan& plan) {
  plan.dense_in = 4;
}
void run_bias(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
              Workspace, const Stream& stream) {
  if (!multiply(attributes_of<ContractAttributes>(prim), in[0], in[1], out[0],
                {Epilogue::kBias, in[2].device_data()}, stream))
    compute("add", {out[0], in[2]}, out[0], stream);
}

void run_gelu(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
              Workspace, const Stream& stream) {
  const Tensor &y = out[0], &x = out[1];
  if (multiply(attributes_of<ContractAttributes>(prim), in[0], in[1], y,
               {Epilogue::kGelu, in[2].device_data(), x.device_data()}, stream))
    return;
  compute("add", {y, in[2]}, x, stream);
  compute("gelu_tanh", {x}, y, stream);
}

void run_gelu_grad(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
                   Workspace, const Stream& stream) {
  const Tensor &g = out[0], &x = in[2];
  if (multiply(attributes_of<ContractAttributes>(prim), in[0], in[1], g,
               {Epilogue::kGeluGrad, out[1].device_data(), x.device_data()}, stream))
    return;
  compute("gelu_tanh_grad", {g, x}, g, stream);
  reduce_dims("sum", g, (1u << (g.ndim() - 1)) - 1, out[1], stream);
}

void run_sums(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
              Workspace, const Stream& stream) {
  const auto& a = attributes_of<ContractSumsAttributes>(prim);
  if (multiply(a, in[0], in[1], out[0],
               {a.of_b ? Epilogue::kSumsOfB : Epilogue::kSumsOfA, out[1].device_data()}, stream))
    return;
  uint32_t mask = 0;
  for (size_t d = 0; d < a.summed().size(); ++d) mask |= uint32_t(!has(a.out, a.summed()[d])) << d;
  const Tensor& x = in[a.of_b];
  Tensor dense = x;
  if (!x.is_contiguous()) {
    dense = empty(x.shape(), x.dtype(), x.device());
    convert(x, dense, stream);
  }
  reduce_dims("sum", dense, mask, out[1], stream);
}

// The sum may take the place of what is added; not of a factor that happens to have its layout.
void plan_add(const Primitive&, std::span<const Tensor> in, std::span<Meta> out, Plan& plan) {
  const auto is_like_out = [&](const Tensor& t) { return same_layout(t.meta(), out[0]); };
  plan.dense_in = 4;
  plan.in_place = plan.assign_in_place = std::ranges::none_of(in.first(2), is_like_out);
}
void run_add(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
             Workspace, const Stream& stream) {
  const auto& a = attributes_of<ContractAttributes>(prim);
  const Epilogue add{.kind = Epilogue::kAdd, .addend = in[2].device_data()};
  if (multiply(a, in[0], in[1], out[0], add, stream)) return;
  const Tensor product = empty(out[0].shape(), out[0].dtype(), out[0].device());
  multiply(a, in[0], in[1], product, {}, stream);
  compute("add", {product, in[2]}, out[0], stream);
}

// Operands a [M, K] and b [N, K] of eight bits, the scale of each, and maybe a bias [N]. The
// library multiplies where K and N are multiples of 16: zeros make them so. K is the number of
// tokens in the product that is a weight's gradient, whose operands are turned, so copied, anyway.
// Where it does not multiply them, they are widened to bf16, which holds their values.
constexpr int64_t kEightBitMultiple = 16;

int64_t rounded_up(int64_t n) {
  return (n + kEightBitMultiple - 1) / kEightBitMultiple * kEightBitMultiple;
}

// `t`, dense and with zeros behind its rows and columns.
Tensor padded(const Tensor& t, int64_t rows, int64_t columns, const Stream& stream) {
  const bool fits = t.size(0) == rows && t.size(1) == columns;
  if (fits && t.is_contiguous()) return t;
  const Tensor whole = empty({rows, columns}, t.dtype(), t.device());
  if (!fits) fill(whole.device_data(), 0, 1, size_t(rows * columns), stream);
  convert(t, Tensor({t.shape(), {columns, 1}, t.dtype(), t.device()}, whole.storage()), stream);
  return whole;
}
// The first `columns` columns of `t`, or its first rows.
Tensor first_columns(const Tensor& t, int64_t columns) {
  return Tensor({{t.size(0), columns}, t.strides(), t.dtype(), t.device()}, t.storage(),
                t.offset());
}
Tensor first_rows(const Tensor& t, int64_t rows) {
  return Tensor({{rows, t.size(1)}, t.strides(), t.dtype(), t.device()}, t.storage(), t.offset());
}

void plan_scaled(const Primitive&, std::span<const Tensor>, std::span<Meta>, Plan& plan) {
  plan.dense_in = 0b11100;  // run_scaled copies a and b, with zeros behind
}
void run_scaled(const Primitive&, std::span<const Tensor> in, std::span<const Tensor> out,
                Workspace, const Stream& stream) {
  if (out[0].numel() == 0) return;
  const auto in_dtype = [&](const Tensor& t, DType dtype) {
    if (t.dtype() == dtype) return t;
    const Tensor other = empty(t.shape(), dtype, t.device());
    convert(t, other, stream);
    return other;
  };
  const Tensor& y = out[0];
  const int64_t m = in[0].size(0), n = in[1].size(0), k = in[0].size(1);
  const bool pads = multiplies_eight_bits(stream) && k > 0;
  const int64_t padded_n = pads ? rounded_up(n) : n, padded_k = pads ? rounded_up(k) : k;
  const Tensor a = padded(in[0], m, padded_k, stream),
               b = padded(in[1], padded_n, padded_k, stream),
               whole = padded_n == n ? y : empty({m, padded_n}, y.dtype(), y.device());
  const Tensor scale_a = in_dtype(in[2], kF32), scale_b = in_dtype(in[3], kF32),
               bias = in.size() > 4 ? in_dtype(in[4], y.dtype()) : Tensor();
  Epilogue with_bias;
  if (bias.defined() && y.dtype() != kF32 && padded_n == n)
    with_bias = {Epilogue::kBias, bias.device_data()};
  if (library_product({a.dtype(), b.dtype(), y.dtype()}, {}, m, padded_n, padded_k,
                      {whole.device_data(), padded_n, 1, {}}, {a.device_data(), padded_k, 1, {}},
                      {b.device_data(), 1, padded_k, {}}, stream, with_bias,
                      {scale_a.device_data(), scale_b.device_data()})) {
    if (padded_n != n) convert(first_columns(whole, n), y, stream);
    if (bias.defined() && !with_bias) compute("add", {y, bias}, y, stream);
    return;
  }
  const Tensor sum = y.dtype() == kF32 ? y : empty(y.shape(), kF32, y.device());
  ContractAttributes rows;
  rows.parse("mk,nk->mn");
  multiply(rows, in_dtype(a, kBF16), in_dtype(first_rows(b, n), kBF16), sum, {}, stream);
  for (const Tensor& scale : {scale_a, scale_b}) compute("mul", {sum, scale}, sum, stream);
  if (bias.defined()) compute("add", {sum, in_dtype(bias, kF32)}, sum, stream);
  if (!sum.is_same(y)) convert(sum, y, stream);
}

}  // namespace

void register_contract(KernelTable& table) {
  table.add(register_cuda(), "contract", {.run = run_contract});
  table.add(register_cuda(), "contract_bias", {.plan = plan_third_dense, .run = run_bias});
  table.add(register_cuda(), "contract_gelu", {.plan = plan_third_dense, .run = run_gelu});
  table.add(register_cuda(), "contract_gelu_grad",
            {.plan = plan_third_dense, .run = run_gelu_grad});
  table.add(register_cuda(), "contract_sums", {.run = run_sums});
  table.add(register_cuda(), "contract_wide", {.run = run_contract});
  table.add(register_cuda(), "contract_add", {.plan = plan_add, .run = run_add});
  table.add(register_cuda(), "scaled_matmul", {.plan = plan_scaled, .run = run_scaled});
}

}  // namespace tessera::cuda
