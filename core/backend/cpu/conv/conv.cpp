// Convolutions on the CPU: activations lie channels-last, operands that do not are copied so once.
// bf16 with whole panels of channels is computed by kernels of ours, and so are 3 x 3 without
// strides in f32 and f32 convolutions that products are faster for; others of f32 and bf16 run in
// oneDNN, which has weights packed into the layout that it wants. f64, and padding that the library
// does not know, run in a loop nest; f16 is computed in f32. Invariant: a result of activations is
// channels-last, one of weights is row-major.
#include <algorithm>
#include <oneapi/dnnl/dnnl.hpp>

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
#include "core/primitive/primitive_of.h"

namespace tessera::cpu {
namespace {

using Data = dnnl::memory::data_type;
using Sizes = dnnl::memory::dims;

// Where the operands of the family are in a call: ConvRole says what is computed. T is Tensor, or
// Meta, for the result of a plan has its layout but no memory yet.
template <class T>
struct Operands {
  const T &x, &w, &y;
};

ConvRole role_of(const Primitive& prim) {
  static const OpId forward = intern_op("conv"), input = intern_op("conv_grad_input");
  return prim.id() == forward ? ConvRole::kOutput
         : prim.id() == input ? ConvRole::kInput
                              : ConvRole::kWeight;
}

template <class T>
Operands<T> operands_of(ConvRole role, const T& first, const T& second, const T& result) {
  switch (role) {
    case ConvRole::kOutput: return {first, second, result};
    case ConvRole::kInput: return {result, second, first};
    default: return {second, result, first};
  }
}

// A prepared convolution with the memory objects it runs on; only their pointers change between
// calls. `pack` brings weights into the library's layout, or a gradient out of it; without one they
// are in it already.
struct Prepared final : RefCounted {
  dnnl::primitive conv, pack;
  dnnl::memory x, w, y, packed, scratch, pack_scratch;
  size_t packed_bytes = 0, scratch_bytes = 0;
  size_t workspace() const { return packed_bytes + scratch_bytes; }
};

size_t in_lines(size_t bytes) { return (bytes + 63) / 64 * 64; }

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

Ref<const Prepared> prepare(ConvRole role, const ConvAttributes::Window& window,
                            const Operands<Meta>& m) {
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
  const auto forward = description_of<dnnl::convolution_forward>(
      attr, dnnl::prop_kind::forward_training, algorithm, x, w, y, stride, gaps, begin, end);
  Ref<Prepared> made = make_ref<Prepared>();
  Prepared& p = *made;
  dnnl::memory::desc packed, scratch;
  if (role == ConvRole::kOutput) {
    p.conv = dnnl::convolution_forward(forward);
    packed = forward.weights_desc(), scratch = forward.scratchpad_desc();
  } else if (role == ConvRole::kInput) {
    const auto pd = backward_description_of<dnnl::convolution_backward_data>(
        attr, forward, algorithm, x, w, y, stride, gaps, begin, end);
    p.conv = dnnl::convolution_backward_data(pd);
    packed = pd.weights_desc(), scratch = pd.scratchpad_desc();
  } else {
    const auto pd = backward_description_of<dnnl::convolution_backward_weights>(
        attr, forward, algorithm, x, w, y, stride, gaps, begin, end);
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
  return made;
}

Ref<const Prepared> prepared(ConvRole role, const ConvAttributes::Window& window,
                             const Operands<Meta>& m) {
  LibraryThreads threads;
  try {
    return prepare(role, window, m);
  } catch (const dnnl::error& e) {
    throw UserError(
        fmt::format("convolution: oneDNN has none of x {}{} and weight {} with stride {}, dilation "
                    "{}, padding {} and {}: {}",
                    name_of(m.x.dtype), to_string(m.x.shape), to_string(m.w.shape),
                    to_string(window.stride), to_string(window.dilation),
                    to_string(window.pad_begin), to_string(window.pad_end), e.what()));
  }
}

void execute(const dnnl::primitive& primitive, std::span<const dnnl_exec_arg_t> args) {
  dnnl_status_t status =
      dnnl_primitive_execute(primitive.get(), stream().get(), int(args.size()), args.data());
  TESSERA_ASSERT(status == dnnl_success, "oneDNN convolution failed with status {}", int(status));
}

void run_pack(const Prepared& p, const dnnl::memory& from, const dnnl::memory& to) {
  const dnnl_exec_arg_t args[] = {{DNNL_ARG_FROM, from.get()},
                                  {DNNL_ARG_TO, to.get()},
                                  {DNNL_ARG_SCRATCHPAD, p.pack_scratch.get()}};
  execute(p.pack, args);
}

// x and y are channels-last.
void run_library(const Prepared& p, ConvRole role, const Operands<Tensor>& o, void* work) {
  LibraryThreads threads;
  auto address = [](const Tensor& t, bool written) {
    return written ? t.raw() : const_cast<void*>(t.raw_values());
  };
  p.x.set_data_handle(address(o.x, role == ConvRole::kInput));
  p.w.set_data_handle(address(o.w, role == ConvRole::kWeight));
  p.y.set_data_handle(address(o.y, role == ConvRole::kOutput));
  p.packed.set_data_handle(p.pack ? work : p.w.get_data_handle());
  void* scratch = static_cast<char*>(work) + p.packed_bytes;
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

// How a convolution is computed.
struct ConvPlan final : RefCounted {
  enum class By : uint8_t {
    kProduct,   // conv_product
    kWinograd,  // conv_winograd
    kPlaces,    // conv_places
    kDots,      // conv_dot_rows, conv_dot_weight
    kLibrary,
    kNest,  // conv_nest
    kF32,   // any of the others, of operands that are converted
  };
  By by = By::kNest;
  size_t workspace_bytes = 0;
  PlannedGemm product;           // kProduct, kPlaces
  Ref<const Prepared> library;   // kLibrary
  Ref<const ConvPlan> computed;  // kF32
};

// What the library computes, by the kernel that is fastest.
void plan_fast(ConvPlan& p, ConvRole role, const ConvAttributes::Window& window,
               const Operands<Meta>& m) {
  using By = ConvPlan::By;
  const bool by_weight = role == ConvRole::kWeight;
  if (is_conv_product(role, window, m.x, m.w, m.y)) {
    p.by = By::kProduct, p.product = plan_conv_product(role, m.x, m.w, m.y);
    p.workspace_bytes = p.product.workspace_bytes();
  } else if (suits_conv_winograd(role, window, m.x, m.w, m.y)) {
    p.by = By::kWinograd;
    p.workspace_bytes = conv_winograd_workspace(role, window, m.x, m.w, m.y);
  } else if (by_weight && suits_conv_places(window, m.x, m.w, m.y)) {
    p.by = By::kPlaces, p.product = plan_conv_places(m.w, m.y);
    p.workspace_bytes = conv_places_workspace(p.product, m.w, m.y);
  } else if (by_weight && suits_conv_dot_weight(window, m.x, m.w, m.y)) {
    p.by = By::kDots, p.workspace_bytes = conv_dot_weight_workspace(window, m.x, m.w, m.y);
  } else if (!by_weight && suits_conv_dot_rows(role, window, m.x, m.w, m.y)) {
    p.by = By::kDots, p.workspace_bytes = conv_dot_rows_workspace(role, window, m.x, m.w, m.y);
  } else {
    p.by = By::kLibrary, p.library = prepared(role, window, m);
    p.workspace_bytes = p.library->workspace();
  }
}

Ref<const ConvPlan> make_plan(const ConvAttributes& a, ConvRole role, const Meta& first,
                              const Meta& second, const Meta& result) {
  Ref<ConvPlan> p = make_ref<ConvPlan>();
  const DType t = result.dtype;
  if (in_library(a, t)) {
    plan_fast(*p, role, a.window, operands_of(role, first, second, result));
  } else if (t != kF64 && t != kF32) {
    auto wide = [](const Meta& m) { return Meta::contiguous(m.shape, kF32, m.device); };
    Meta wide_result = result;  // lies as the result does: WideResult
    wide_result.dtype = kF32;
    p->by = ConvPlan::By::kF32;
    p->computed = make_plan(a, role, wide(first), wide(second), wide_result);
    p->workspace_bytes = p->computed->workspace_bytes;
  }
  return p;
}

// `work` is scratch of p.workspace_bytes.
void run_planned(const ConvPlan& p, const ConvAttributes& a, ConvRole role, const Tensor& first,
                 const Tensor& second, const Tensor& result, void* work) {
  using By = ConvPlan::By;
  const ConvAttributes::Window& window = a.window;
  const Operands<Tensor> o = operands_of(role, first, second, result);
  if (p.by == By::kProduct) return run_conv_product(role, window, p.product, o.x, o.w, o.y, work);
  if (p.by == By::kNest) return run_conv_nest(role, window, o.x, o.w, o.y);
  if (p.by == By::kF32) {
    const WideResult wide(result);
    run_planned(*p.computed, a, role, converted(first, kF32), converted(second, kF32), wide.get(),
                work);
    return wide.finish();
  }
  const Tensor x = role == ConvRole::kInput ? o.x : as_channels_last(o.x),
               y = role == ConvRole::kOutput ? o.y : as_channels_last(o.y);
  if (p.by == By::kWinograd) return run_conv_winograd(role, window, x, o.w, y, work);
  if (p.by == By::kPlaces) return run_conv_places(window, p.product, x, o.w, y, work);
  if (p.by == By::kLibrary) return run_library(*p.library, role, {x, o.w, y}, work);
  if (role == ConvRole::kWeight) return run_conv_dot_weight(window, x, o.w, y, work);
  run_conv_dot_rows(role, window, x, o.w, y, work);
}

void plan_conv(const Primitive& prim, std::span<const Tensor> in, std::span<Meta> out, Plan& plan) {
  const auto& a = attributes_of<ConvAttributes>(prim);
  const ConvRole role = role_of(prim);
  if (role != ConvRole::kWeight) out[0].strides = channels_last_strides(out[0].shape);
  Meta r = in[1].meta();
  // The library takes no weight that is one value seen several times.
  for (int i = 0; i < r.shape.size() && role != ConvRole::kWeight; ++i)
    if (r.strides[i] == 0 && r.shape[i] > 1) plan.dense_in = 2;
  if (plan.dense_in) r.strides = contiguous_strides(r.shape);
  if (numel(out[0].shape) == 0 || in[0].numel() == 0 || in[1].numel() == 0) return;
  Ref<const ConvPlan> p = make_plan(a, role, in[0].meta(), r, out[0]);
  plan.workspace_bytes = p->workspace_bytes;
  plan.state = std::move(p);
}

void run_conv(const Primitive& prim, std::span<const Tensor> in, std::span<const Tensor> out,
              Workspace work, const Stream&) {
  if (out[0].numel() == 0) return;
  if (in[0].numel() == 0 || in[1].numel() == 0) {  // empty sums
    std::fill_n(static_cast<char*>(out[0].raw()), out[0].nbytes(), char(0));
    return;
  }
  run_planned(work.planned<ConvPlan>(), attributes_of<ConvAttributes>(prim), role_of(prim), in[0],
              in[1], out[0], work.data);
}

}  // namespace

void register_conv(KernelTable& t) {
  for (const char* op : {"conv", "conv_grad_input", "conv_grad_weight"})
    t.add(DeviceKind::kCPU, op, {.plan = plan_conv, .run = run_conv, .keeps_plan = true});
}

}  // namespace tessera::cpu
