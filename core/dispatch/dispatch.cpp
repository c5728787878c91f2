#include "core/dispatch/dispatch.h"

#include <bit>

#include "core/dispatch/call.h"
#include "core/dispatch/context.h"
#include "core/dispatch/copy.h"
#include "core/dispatch/observer.h"
#include "core/dispatch/precision.h"
#include "core/dispatch/sharding.h"
#include "core/tensor/wrapped.h"

namespace tessera {
namespace {

constexpr LayerMask kAllLayers = 0xff;

// As context(), inlined in this file.
Context& of_thread() {
  thread_local Context c;
  return c;
}

// A wrapper whose transform has returned has no level: ops would run on its values without history.
void refuse_left_behind(const Primitive& prim, std::span<const Tensor> in) {
  for (const Tensor& t : in)
    if (const Wrapped* w = wrapped(t))
      TESSERA_CHECK(w->in_use(),
                    "{}: {} belongs to a function transform that is over; return the tensor from "
                    "the function instead of keeping it",
                    prim.name(), describe(t));
}

// Kernels have no arithmetic on storage formats, and some choose their code by an element's size.
void refuse_storage(const Primitive& prim, std::span<const Tensor> in) {
  for (const Tensor& t : in)
    if (is_storage_only(t.dtype())) [[unlikely]]
      TESSERA_CHECK(prim.traits().may_take_storage(),
                    "{}: an operand is {}; {} is a storage format, convert it by .to(kF32) first",
                    prim.name(), describe(t), name_of(t.dtype()));
}

// The operands that the op takes in one dtype, where their dtypes differ; empty where nothing is to
// be promoted.
Inputs to_promote(Promotion which, Inputs in) {
  if (which == Promotion::kNone) return {};
  if (which == Promotion::kAfterFirst) in = in.subspan(1);
  for (size_t i = 1; i < in.size(); ++i)
    if (in[i].dtype() != in[0].dtype()) return in;
  return {};
}

Tensors run_layers(LayerMask allowed, const PrimRef& prim, Inputs in) {
  Context& c = of_thread();
  if (allowed == kAllLayers) [[likely]] {
    bring_up_to_date(in);
    notify(events::HandlesRead{in}, c.observer);
    refuse_storage(*prim, in);
  }
  // Promotion comes after autocast and above autograd, so its casts are recorded.
  const Promotion which = prim->traits().promotion;
  if (which != Promotion::kNone && (allowed & bit(Layer::kAutograd)) &&
      !(c.forced & c.enabled & allowed & bit(Layer::kAutocast)))
    if (Inputs differing = to_promote(which, in); !differing.empty()) [[unlikely]]
      promote_operands(differing);
  LayerMask asked = c.forced;
  for (const Tensor& t : in) asked |= t.layers();
  if (asked & kWrappedBit) [[unlikely]]
    refuse_left_behind(*prim, in);
  if (LayerMask mask = asked & allowed & c.enabled) {
    int layer = std::countr_zero(unsigned(mask));
    TESSERA_ASSERT(layer_functions[layer], "{}: layer {} is not in this build", prim->name(),
                   layer);
    return layer_functions[layer](prim, in);
  }
  Backend& backend = c.backend ? *c.backend : eager_backend();
  if (prim->is_view() && !prim->viewable(in)) [[unlikely]]
    in[0] = std::move(backend.run(copy_primitive(), in.first(1))[0]);
  return backend.run(prim, in);
}

}  // namespace

Context& context() { return of_thread(); }
Observer* current_observer() { return of_thread().observer; }

BackendScope::BackendScope(DispatchTarget target) : target_(context().target(), target) {
  TESSERA_ASSERT(target.backend || !(target.observer || target.records),
                 "dispatch: an observer or a recording without a backend, so that views would "
                 "pass it by");
}

bool bypasses_layers(const Tensor& t) {
  bring_up_to_date({&t, 1});
  const Context& c = of_thread();
  return c.backend == nullptr && ((t.layers() | c.forced) & c.enabled) == 0;
}

Tensors dispatch(const PrimRef& prim, Inputs in) { return run_layers(kAllLayers, prim, in); }

Tensor dispatch1(const PrimRef& prim, Inputs in) {
  return std::move(run_layers(kAllLayers, prim, in)[0]);
}

Tensor dispatch_into(const Tensor& grad_buffer, const PrimRef& prim, Inputs in) {
  if (!grad_buffer.defined()) return dispatch1(prim, in);
  for (const Tensor& t : in)
    if (t.layers() & context().enabled) return dispatch1(prim, in);
  if (!to_promote(prim->traits().promotion, in).empty()) return dispatch1(prim, in);
  const Meta result = prim->infer(metas_of(in))[0];
  if (result.shape != grad_buffer.shape() || result.dtype != grad_buffer.dtype())
    return dispatch1(prim, in);
  assign({&grad_buffer, 1}, prim, in);
  return grad_buffer;
}

Tensors dispatch_below(Layer above, const PrimRef& prim, Inputs in) {
  return run_layers(LayerMask(0xff << (int(above) + 1)), prim, in);
}

void assign(std::span<const Tensor> dst, const PrimRef& prim, Inputs in) {
  Context& c = of_thread();
  LayerMask asked = 0;
  bring_up_to_date(dst), bring_up_to_date(in);
  refuse_storage(*prim, in);
  for (const Tensor& t : in) asked |= t.layers();
  for (const Tensor& d : dst) {
    asked |= d.layers();
    for (int i = 0; i < d.ndim(); ++i)
      TESSERA_CHECK(d.strides()[i] != 0 || d.shape()[i] <= 1 || d.numel() == 0,
                    "assign_: dim {} of destination {} is expanded, its elements share memory; "
                    "clone it first",
                    i, describe(d));
    TESSERA_CHECK(
        !d.impl()->repeated || !d.storage() || d.storage()->use_count() == 1,
        "assign_: destination {} is a part of an expanded tensor, other elements of which "
        "share its memory; clone the expanded tensor first",
        describe(d));
  }
  if ((asked & c.enabled & bit(Layer::kAutograd)) && assign_recorded(dst, prim, in)) return;
  if (c.enabled & bit(Layer::kSharding)) {
    const ShardingLayer* sharding = find_sharding(dst);
    if (!sharding) sharding = find_sharding(in);
    if (sharding) return sharding->assign(dst, prim, in);
  }
  (c.backend ? *c.backend : eager_backend()).assign(dst, prim, in);
}

const ShardingLayer* find_sharding(std::span<const Tensor> tensors) {
  for (const Tensor& t : tensors)
    if (const ShardingLayer* s = sharding_of(t)) return s;
  return nullptr;
}

const ShardingLayer* placing(const Tensor& t) {
  return is_sample(t) ? nullptr : sharding_of(innermost(t));
}

Tensors sharding_layer(const PrimRef& prim, Inputs in) { return find_sharding(in)->run(prim, in); }

Tensor without_values(const Tensor& t) {
  if (const Wrapped* w = wrapped(t)) return wrapper(w->with(without_values(w->inner)));
  const ShardingLayer* sharding = sharding_of(t);
  if (!sharding) return Tensor(t.meta(), nullptr, t.offset());
  const Tensor& local = sharding->local;
  return sharding->with_local(t.meta(), Tensor(local.meta(), nullptr, local.offset()));
}

}  // namespace tessera
