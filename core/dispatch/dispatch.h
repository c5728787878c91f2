// The one dispatch path, few layers, in this order: autocast, autograd, sharding, backend. A layer
// looks at an op only if it is enabled and an input asks for it (or it is forced); without any, an
// op goes straight to the backend. Between autocast and autograd operands are promoted to one
// dtype, where the traits of the op ask for it (Promotion) and theirs differ.
#pragma once
#include "core/primitive/primitive.h"

namespace tessera {

/// Runs `prim` on `in` through every layer that wants it.
Tensors dispatch(const PrimRef& prim, Inputs in);
/// As dispatch, for ops with one result.
Tensor dispatch1(const PrimRef& prim, Inputs in);
/// As dispatch1, but the result lies in `grad_buffer` and is that tensor where `grad_buffer` is
/// defined, has the result's shape and dtype, and no operand asks for a layer: for a vjp, see
/// VjpArgs::grad_buffer.
Tensor dispatch_into(const Tensor& grad_buffer, const PrimRef& prim, Inputs in);
/// For a layer: runs `prim` in the layers below `above`.
Tensors dispatch_below(Layer above, const PrimRef& prim, Inputs in);

/// A layer receives ops whose inputs ask for it; it reaches the rest of the path with
/// dispatch_below.
using LayerFn = Tensors (*)(const PrimRef& prim, Inputs in);
/// Implementations, indexed by Layer; null where the build has none. Defined by core/autograd, the
/// outermost of them, so that linking the core always brings it along.
extern const LayerFn layer_functions[kNumLayers];

/// Before their histories are asked for: gives `tensors` the one that comes of what was assigned to
/// their memory since. Defined by core/autograd, as assign_recorded is.
void follow_assignments(std::span<const Tensor> tensors);
inline void bring_up_to_date(std::span<const Tensor> tensors) {
  if (Storage::any_assigned()) [[unlikely]]
    follow_assignments(tensors);
}
/// As assign, and records it. False, and nothing done, where nothing of it is recorded at the level
/// of the calling thread.
bool assign_recorded(std::span<const Tensor> dst, const PrimRef& prim, Inputs in);

/// True when an op on `t` would go straight to the eager backend: a view may then skip the path
/// altogether.
bool bypasses_layers(const Tensor& t);

/// The effect: dst[i] takes the values of result i of `prim(in)`. Where one of them or of the
/// operands is recorded for gradients, so is this: tensors on the memory of dst[i] have the history
/// of the values afterwards (core/autograd/assigned.h). Throws UserError for a leaf that requires
/// grad.
void assign(std::span<const Tensor> dst, const PrimRef& prim, Inputs in);

/// Builds the operand array of a call in place: dispatch1(prim, operands(std::move(a),
/// std::move(b))).
template <class... T>
struct Operands {
  Tensor v[sizeof...(T)];
  operator Inputs() { return v; }
};
template <class... T>
Operands<T...> operands(T&&... t) {
  return {{std::forward<T>(t)...}};
}

}  // namespace tessera
