// Batching rules: an op on samples becomes one op on the batch. What that op is follows from the
// axis map: it must have the loops of the op on one sample and one kPass loop more, over the batch;
// an op that does not say so of itself is not used. Five ways are tried, in this order:
//
//   a rule            the few ops that axes cannot express: contract (one more letter), convolution
//                     (the batch joins samples or groups), embedding (tables stacked), random draws
//   a leading dim     the batch in dim 0 of every operand that has it, attributes that name dims
//   moved
//                     by one
//   a longer dim 0    samples laid behind each other, where dim 0 passes (pooling, attention)
//   a decomposition   into ops that have one of the above
//   one by one        the op runs on each sample and results are stacked; said once for each op
#pragma once
#include <string>
#include <vector>

#include "core/autograd/level.h"

namespace tessera {

/// True for ops that draw random numbers.
inline bool draws(const Primitive& prim) { return prim.traits().kind == OpKind::kDraw; }

/// Results of `prim` at `level`, which vectorizes, from operands of the level outside; bit i of
/// `batched`: operand i has the batch in dim 0.
Tensors run_batched(Level& level, const PrimRef& prim, std::span<Tensor> in,
                    std::span<const bool> batched);

/// Names of the ops that ran one by one so far, in this process.
std::vector<std::string> ops_batched_one_by_one();

}  // namespace tessera
