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

/// True when an op on `t` would go straight to the eager backend: a view may then skip the path
/// altogether.
bool bypasses_layers(const Tensor& t);

/// The effect: dst[i] takes the values of result i of `prim(in)`. Destinations may not be recorded
/// for gradients.
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
