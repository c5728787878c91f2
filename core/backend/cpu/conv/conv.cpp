// Convolutions on the CPU: activations lie channels-last, operands that do not are copied so once.
// bf16 with whole panels of channels is computed by kernels of ours, and so are 3 x 3 without
// strides in f32 and f32 convolutions that products are faster for; others of f32 and bf16 run in
// oneDNN, which has weights packed into the layout that it wants. f64, and padding that the library
// does not know, run in a loop nest; f16 is computed in f32. Invariant: a result of activations is
// channels-last, one of weights is row-major.
#include <algorithm>
#include <cstring>
#include <oneapi/dnnl/dnnl.hpp>
#include <unordered_map>

#include "core/backend/cpu/channels_last.h"
#include "core/backend/cpu/conv/dot_rows.h"
#include "core/backend/cpu/conv/dot_weight.h"
#include "core/backend/cpu/conv/places.h"
#include "core/backend/cpu/conv/product.h"
#include "core/backend/cpu/conv/winograd.h"
#include "core/backend/cpu/onednn.h"
#include "core/backend/cpu/register.h"
#include "core/backend/cpu/widen.h"
#include "core/base/isa.h"
#include "core/base/parallel.h"

namespace tessera::cpu {
namespace {

using Data = dnnl::memory::data_type;
using Sizes = dnnl::memory::dims;

// Where the operands of the family are in a call: ConvRole says what is computed.
struct Operands {
  const Tensor &x, &w, &y;
};

ConvRole role_of(const Primitive& prim) {
  static const OpId forward = intern_op("conv"), input = intern_op("conv_grad_input");
  return prim.id() == forward ? ConvRole::kOutput
         : prim.id() == input ? ConvRole::kInput
                              : ConvRole::kWeight;
}

Operands operands_of(ConvRole role, std::span<const Tensor> in, const Tensor& out) {
  switch (role) {
    case ConvRole::kOutput: return {in[0], in[1], out};
    case ConvRole::kInput: return {out, in[1], in[0]};
    default: return {in[1], out, in[0]};
  }
}

// A prepared convolution with the memory objects it runs on; only their pointers change between
// calls. `pack` brings weights into the library's layout, or a gradient out of it; without one they
// are in it already.
struct Prepared {
  dnnl::primitive conv, pack;
  dnnl::memory x, w, y, packed, scratch, pack_scratch;
  size_t packed_bytes = 0, scratch_bytes = 0;
  size_t workspace() const { return packed_bytes + scratch_bytes; }
};

// All that a prepared convolution depends on, as numbers.
using ConvKey = SmallVector<int64_t, 48>;
struct ConvKeyHash {
  size_t operator()(const ConvKey& k) const {
    return std::hash<std::string_view>()(
        {reinterpret_cast<const char*>(k.data()), k.size() * sizeof(int64_t)});
  }
};

constexpr size_t kMaxPrepared = 1024;  // programs with ever new shapes start over rather than grow

size_t in_lines(size_t bytes) { return (bytes + 63) / 64 * 64; }

// The result of a plan has its layout but no memory yet, hence metas.
struct ConvMetas {
  const Meta &x, &w, &y;
};

ConvKey key_of(ConvRole role, const ConvAttributes::Window& window, const ConvMetas& m) {
  ConvKey key{int64_t(role), int64_t(m.x.dtype), num_threads(), window.groups};
  for (const Dims* d : {&m.x.shape, &m.w.shape, &m.w.strides, &m.y.shape, &window.stride,
                        &window.dilation, &window.pad_begin, &window.pad_end})
    key.append(d->begin(), d->end());
  return key;
}

dnnl::memory::desc channels_last(const Meta& m, Data type) {
  Strides st = channels_last_strides(m.shape);
  return {Sizes(m.shape.begin(), m.shape.end()), type, Sizes(st.begin(), st.end())};
}

// Weights [O, I, K..], with groups [G, O / G, I, K..].
dnnl::memory::desc weights(const Meta& m, int64_t groups, Data type, bool any) {
  Sizes sizes(m.shape.begin(), m.shape.end()), strides(m.strides.begin(), m.strides.end());
  if (groups > 1) {
    sizes[0] /= groups;
    sizes.insert(sizes.begin(), groups);
    strides.insert(strides.begin(), sizes[1] * strides[0]);
  }
  for (size_t i = 0; i < sizes.size(); ++i)
    if (sizes[i] == 1) strides[i] = std::max<int64_t>(strides[i], 1);  // may be any
  if (any) return {sizes, type, dnnl::memory::format_tag::any};
  return {sizes, type, strides};
}

Prepared prepare(ConvRole role, const ConvAttributes::Window& window, const ConvMetas& m) {
  const Data type = m.x.dtype == kBF16 ? Data::bf16 : Data::f32;
  const auto algorithm = dnnl::algorithm::convolution_direct;
  dnnl::memory::desc x = channels_last(m.x, type), y = channels_last(m.y, type),
                     w = weights(m.w, window.groups, type, true),
                     user = weights(m.w, window.groups, type, false);
  Sizes stride(window.stride.begin(), window.stride.end()),
      begin(window.pad_begin.begin(), window.pad_begin.end()),
      end(window.pad_end.begin(), window.pad_end.end()), gaps;
  for (int64_t d : window.dilation) gaps.push_back(d - 1);
  dnnl::primitive_attr attr;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  dnnl::convolution_forward::primitive_desc forward(
      {dnnl::prop_kind::forward_training, algorithm, x, w, y, stride, gaps, begin, end}, attr,
      engine());
  Prepared p;
  dnnl::memory::desc packed, scratch;
  if (role == ConvRole::kOutput) {
    p.conv = dnnl::convolution_forward(forward);
    packed = forward.weights_desc(), scratch = forward.scratchpad_desc();
  } else if (role == ConvRole::kInput) {
    dnnl::convolution_backward_data::primitive_desc pd(
        {algorithm, x, w, y, stride, gaps, begin, end}, attr, engine(), forward);
    p.conv = dnnl::convolution_backward_data(pd);
    packed = pd.weights_desc(), scratch = pd.scratchpad_desc();
  } else {
    dnnl::convolution_backward_weights::primitive_desc pd(
        {algorithm, x, w, y, stride, gaps, begin, end}, attr, engine(), forward);
    p.conv = dnnl::convolution_backward_weights(pd);
    packed = pd.diff_weights_desc(), scratch = pd.scratchpad_desc();
  }
  auto handle = [](const dnnl::memory::desc& d) { return dnnl::memory(d, engine(), nullptr); };
  p.x = handle(x), p.y = handle(y), p.w = handle(user), p.packed = handle(packed);
  p.scratch_bytes = in_lines(scratch.get_size());
  if (packed != user) {
    const bool out = role == ConvRole::kWeight;
    dnnl::reorder::primitive_desc pack(engine(), out ? packed : user, engine(), out ? user : packed,
                                       attr);
    p.pack = dnnl::reorder(pack);
    p.pack_scratch = handle(pack.scratchpad_desc());
    p.packed_bytes = in_lines(packed.get_size());
    p.scratch_bytes = std::max(p.scratch_bytes, in_lines(pack.scratchpad_desc().get_size()));
  }
  p.scratch = handle(scratch);
  return p;
}

Prepared& prepared(ConvRole role, const ConvAttributes::Window& window, const ConvMetas& m) {
  thread_local std::unordered_map<ConvKey, Prepared, ConvKeyHash> cache;
  LibraryThreads threads;
  ConvKey key = key_of(role, window, m);
  auto it = cache.find(key);
  if (it == cache.end()) {
    if (cache.size() >= kMaxPrepared) cache.clear();
    try {
      it = cache.emplace(key, prepare(role, window, m)).first;
    } catch (const dnnl::error& e) {
      throw UserError(fmt::format(
          "convolution: oneDNN has none of x {}{} and weight {} with stride {}, dilation "
          "{}, padding {} and {}: {}",
          name_of(m.x.dtype), to_string(m.x.shape), to_string(m.w.shape), to_string(window.stride),
          to_string(window.dilation), to_string(window.pad_begin), to_string(window.pad_end),
          e.what()));
    }
  }
  return it->second;
}

void execute(const dnnl::primitive& primitive, std::span<const dnnl_exec_arg_t> args) {
  dnnl_status_t status =
      dnnl_primitive_execute(primitive.get(), stream().get(), int(args.size()), args.data());
  TESSERA_ASSERT(status == dnnl_success, "oneDNN convolution failed with status {}", int(status));
}

void run_pack(Prepared& p, const dnnl::memory& from, const dnnl::memory& to) {
  const dnnl_exec_arg_t args[] = {{DNNL_ARG_FROM, from.get()},
                                  {DNNL_ARG_TO, to.get()},
                                  {DNNL_ARG_SCRATCHPAD, p.pack_scratch.get()}};
  execute(p.pack, args);
}

void run_library(ConvRole role, const ConvAttributes::Window& window, const Operands& o,
                 Workspace work) {
  Tensor x = role == ConvRole::kInput ? o.x : as_channels_last(o.x),
         y = role == ConvRole::kOutput ? o.y : as_channels_last(o.y);
  LibraryThreads threads;
  Prepared& p = prepared(role, window, {o.x.meta(), o.w.meta(), o.y.meta()});
  Tensor own;
  if (p.workspace() > work.bytes)  // planned with fewer threads
    own = empty({int64_t(p.workspace())}, kU8), work = {own.raw(), p.workspace()};
  auto address = [](const Tensor& t, bool written) {
    return written ? t.raw() : const_cast<void*>(t.raw_values());
  };
  p.x.set_data_handle(address(x, role == ConvRole::kInput));
  p.w.set_data_handle(address(o.w, role == ConvRole::kWeight));
  p.y.set_data_handle(address(y, role == ConvRole::kOutput));
  p.packed.set_data_handle(p.pack ? work.data : p.w.get_data_handle());
  void* scratch = static_cast<char*>(work.data) + p.packed_bytes;
  p.scratch.set_data_handle(scratch);
  if (p.pack) p.pack_scratch.set_data_handle(scratch);

  if (p.pack && role != ConvRole::kWeight) run_pack(p, p.w, p.packed);
  const bool out = role == ConvRole::kOutput, input = role == ConvRole::kInput;
  const dnnl_exec_arg_t args[] = {
      {input ? DNNL_ARG_DIFF_SRC : DNNL_ARG_SRC, p.x.get()},
      {role == ConvRole::kWeight ? DNNL_ARG_DIFF_WEIGHTS : DNNL_ARG_WEIGHTS, p.packed.get()},
      {out ? DNNL_ARG_DST : DNNL_ARG_DIFF_DST, p.y.get()},
      {DNNL_ARG_SCRATCHPAD, p.scratch.get()}};
  execute(p.conv, args);
  if (p.pack && role == ConvRole::kWeight) run_pack(p, p.packed, p.w);
}

// True when the library computes it, or a kernel of ours does in its place: less than a step of x
// is not read, and the numbers leave room in the library's 32 bits.
bool in_library(const ConvAttributes& a, DType t) {
  constexpr int64_t kMost = int64_t(1) << 20;
  const ConvAttributes::Window& w = a.window;
  if (t != kF32 && t != kBF16) return false;
  if (t == kBF16 && !has_bf16_dot()) return false;  // the library would emulate them
  for (int i = 0; i < a.spatial(); ++i)
    if (w.pad_end[i] + w.stride[i] <= 0 ||
        std::max({w.stride[i], w.dilation[i], w.pad_begin[i], w.pad_end[i]}) > kMost)
      return false;
  return true;
}

bool by_winograd(ConvRole role, const ConvAttributes::Window& window, const ConvMetas& m) {
  return suits_conv_winograd(role, window, m.x, m.w, m.y);
}
void run_winograd(ConvRole role, const ConvAttributes::Window& window, const Operands& o,
                  Workspace work) {
  const Tensor x = role == ConvRole::kInput ? o.x : as_channels_last(o.x),
               y = role == ConvRole::kOutput ? o.y : as_channels_last(o.y);
  run_conv_winograd(role, window, x, o.w, y, work);
}

bool by_places(ConvRole role, const ConvAttributes::Window& window, const ConvMetas& m) {
  return role == ConvRole::kWeight && suits_conv_places(window, m.x, m.w, m.y);
}

bool by_dots(ConvRole role, const ConvAttributes::Window& window, const ConvMetas& m) {
  return role == ConvRole::kWeight ? suits_conv_dot_weight(window, m.x, m.w, m.y)
                                   : suits_conv_dot_rows(role, window, m.x, m.w, m.y);
}
size_t dots_workspace(ConvRole role, const ConvAttributes::Window& window, const ConvMetas& m) {
  return role == ConvRole::kWeight ? conv_dot_weight_workspace(window, m.x, m.w, m.y)
                                   : conv_dot_rows_workspace(role, window, m.x, m.w, m.y);
}
void run_dots(ConvRole role, const ConvAttributes::Window& window, const Operands& o,
              Workspace work) {
  const Tensor x = role == ConvRole::kInput ? o.x : as_channels_last(o.x),
               y = role == ConvRole::kOutput ? o.y : as_channels_last(o.y);
  if (role == ConvRole::kWeight)
    run_conv_dot_weight(window, x, o.w, y, work);
  else
    run_conv_dot_rows(role, window, x, o.w, y, work);
}

// By the kernel that plan_conv reserved memory for.
void run_planned(ConvRole role, const ConvAttributes::Window& window, const Operands& o,
                 Workspace work) {
  const ConvMetas m{o.x.meta(), o.w.meta(), o.y.meta()};
  if (is_conv_product(role, window, m.x, m.w, m.y))
    return run_conv_product(role, window, o.x, o.w, o.y, work);
  if (by_winograd(role, window, m)) return run_winograd(role, window, o, work);
  if (by_places(role, window, m))
    return run_conv_places(window, as_channels_last(o.x), o.w, as_channels_last(o.y), work);
  if (by_dots(role, window, m)) return run_dots(role, window, o, work);
  run_library(role, window, o, work);
}

void plan_conv(const Primitive& prim, std::span<const Tensor> in, std::span<Meta> out, Plan& plan) {
  const auto& a = static_cast<const ConvAttributes&>(prim);
  const ConvRole role = role_of(prim);
  if (role != ConvRole::kWeight) out[0].strides = channels_last_strides(out[0].shape);
  Meta l = in[0].meta(), r = in[1].meta();
  // The library takes no weight that is one value seen several times.
  for (int i = 0; i < r.shape.size() && role != ConvRole::kWeight; ++i)
    if (r.strides[i] == 0 && r.shape[i] > 1) plan.dense_in = 2;
  if (plan.dense_in) r.strides = contiguous_strides(r.shape);
  if (!in_library(a, out[0].dtype) || numel(out[0].shape) == 0 || in[0].numel() == 0 ||
      in[1].numel() == 0)
    return;
  ConvMetas m = role == ConvRole::kOutput  ? ConvMetas{l, r, out[0]}
                : role == ConvRole::kInput ? ConvMetas{out[0], r, l}
                                           : ConvMetas{r, out[0], l};
  plan.workspace_bytes =
      is_conv_product(role, a.window, m.x, m.w, m.y) ? conv_product_workspace(role, m.x, m.w, m.y)
      : by_winograd(role, a.window, m) ? conv_winograd_workspace(role, a.window, m.x, m.w, m.y)
      : by_places(role, a.window, m)   ? conv_places_workspace(a.window, m.x, m.w, m.y)
      : by_dots(role, a.window, m)     ? dots_workspace(role, a.window, m)
                                       : prepared(role, a.window, m).workspace();
}

void run_conv(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
              Workspace work, const Stream& stream) {
  const auto& a = static_cast<const ConvAttributes&>(prim);
  const ConvRole role = role_of(prim);
  if (out[0].numel() == 0) return;
  if (in[0].numel() == 0 || in[1].numel() == 0) {  // empty sums
    std::fill_n(static_cast<char*>(out[0].raw()), out[0].nbytes(), char(0));
    return;
  }
  const Operands o = operands_of(role, in, out[0]);
  if (in_library(a, out[0].dtype())) return run_planned(role, a.window, o, work);
  if (out[0].dtype() == kF64 || out[0].dtype() == kF32)
    return run_conv_nest(role, a.window, o.x, o.w, o.y);
  const Tensor wide[] = {converted(in[0], kF32), converted(in[1], kF32)};
  const WideResult result(out[0]);
  run_conv(prim, wide, {&result.get(), 1}, {}, stream);
  result.finish();
}

}  // namespace

void register_conv(KernelTable& t) {
  for (const char* op : {"conv", "conv_grad_input", "conv_grad_weight"})
    t.add(DeviceKind::kCPU, op, {plan_conv, run_conv});
}

}  // namespace tessera::cpu
