// Which ops fused kernels are made of: the closed set that README.md lists.
#pragma once
#include "core/ops/reduce_attributes.h"
#include "core/primitive/primitive.h"

namespace tessera::compiler {

/// Results depend on the operands' elements at the same place only: the pointwise ops, cast, where.
bool is_elementwise(const Primitive& prim);
/// Elementwise and a few vector instructions: cheaper than a pass over memory.
bool is_cheap(const Primitive& prim);
/// Reductions over dims; null otherwise.
const ReduceAttributes* as_reduction(const Primitive& prim);
/// Views whose result reads every loop of the operand as it is: reshape, permute, expand,
/// expand_like.
bool is_transparent_view(const Primitive& prim);
/// Operands of `dtype` may have no result at all (integers divided by zero): the kernel throws, and
/// nobody else may run the op.
bool may_trap(const Primitive& prim, DType dtype);

}  // namespace tessera::compiler
