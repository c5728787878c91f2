// The one dispatch path: few layers in a fixed order, autocast, autograd, sharding, backend. A
// layer looks at an op only if it is enabled and an input asks for it (or it is forced); an op that
// no layer looks at goes straight to the backend. Between autocast and autograd, operands whose
// dtypes differ are promoted to one, where the traits of the op ask for that (Promotion).
#pragma once
#include "core/primitive/primitive.h"

namespace tessera {

/// Runs `prim` on `in` through every layer that looks at it.
Tensors dispatch(const PrimRef& prim, Inputs in);
/// As dispatch, for ops with one result.
Tensor dispatch1(const PrimRef& prim, Inputs in);
/// As dispatch1, but where `grad_buffer` is defined and has the result's shape and dtype, and no
/// operand asks for a layer, writes the result into it and returns it. For a vjp that
/// writes a gradient where it is to lie: see VjpArgs::grad_buffer.
Tensor dispatch_into(const Tensor& grad_buffer, const PrimRef& prim, Inputs in);
/// For a layer: runs `prim` in the layers below `above`.
Tensors dispatch_below(Layer above, const PrimRef& prim, Inputs in);

/// A layer receives ops whose inputs ask for it; it reaches the rest of the path with
/// dispatch_below.
using LayerFn = Tensors (*)(const PrimRef& prim, Inputs in);
/// Implementations, indexed by Layer; null where the build has none. The outermost layer,
/// core/autograd, defines the table, so that linking the core always brings the layers along.
extern const LayerFn layer_functions[kNumLayers];

/// Gives each of `tensors` the history that results from recorded assignments to its memory; called
/// before histories are read. Defined by core/autograd, as assign_recorded is.
void follow_assignments(std::span<const Tensor> tensors);
inline void bring_up_to_date(std::span<const Tensor> tensors) {
  if (Storage::any_assigned()) [[unlikely]]
    follow_assignments(tensors);
}
/// As assign, and records it. Does nothing and returns false where neither a destination nor an
/// operand is recorded at the level of the calling thread.
bool assign_recorded(std::span<const Tensor> dst, const PrimRef& prim, Inputs in);

/// True when an op on `t` would go straight to the eager backend: views are then made without
/// dispatch.
bool bypasses_layers(const Tensor& t);

/// The effect: dst[i] takes the values of result i of `prim(in)`. It is recorded where a
/// destination or an operand is recorded for gradients: afterwards every tensor on the memory of
/// dst[i] has the history of the new values (core/autograd/assigned.h). Throws UserError for a leaf
/// that requires grad.
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
