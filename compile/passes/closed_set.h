// The closed set of ops that fused kernels are made of; README.md lists it.
#pragma once
#include "core/ops/reduce_attributes.h"
#include "core/primitive/primitive.h"

namespace tessera::compiler {

/// True if each element of the result depends only on the operands' elements at the same place: the
/// pointwise ops, cast and where.
bool is_elementwise(const Primitive& prim);
/// True for an elementwise op of a few vector instructions, which costs less than a pass over
/// memory.
bool is_cheap(const Primitive& prim);
/// Returns the attributes of a reduction over dims; null for other ops.
const ReduceAttributes* as_reduction(const Primitive& prim);
/// True for a view that shows all of its operand, so that loops pass through it: reshape, permute,
/// expand, expand_like.
bool is_transparent_view(const Primitive& prim);
/// True if the op may have no result for operands of `dtype` (integers divided by zero): its kernel
/// then throws, so it must run exactly where the program has it.
bool may_trap(const Primitive& prim, DType dtype);

}  // namespace tessera::compiler
