// The closed set of ops that fused kernels are made of: the pointwise ops of core/ops/pointwise.def
// (but floor_divide, remainder and fmod of integers, which may throw), cast, where, copy, the
// reductions sum, prod, amax, amin, any and all, the views reshape, permute, expand and
// expand_like, and full and arange; each also as an effect. Everything else runs as it is.
// decompose() makes ops of this set of some others; but not of cross_entropy, which checks its
// targets, of global_norm, whose order of sums is part of the contract of equal bits, or of
// dropout, whose random bits are no pointwise op.
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
