// Batching rules: how vmap runs an op on samples as one op on the batch. Which op that is follows
// from axis maps. Invariant: the axis map of the op on the batch has the loops of the op on one
// sample and one more kPass loop, over the batch. Five ways are tried, in this order:
//
//   a rule            the few ops that axes cannot express: contract (one more letter), convolution
//                     (the batch joins samples or groups), embedding (tables stacked), random draws
//   a leading dim     the batch is dim 0 of every operand that has it, and attributes that name
//                     dims are moved by one, so that the same op runs with one dim more in front
//                     of its operands and results
//   a longer dim 0    samples are joined along dim 0 if it is a kPass loop (pooling, attention)
//   a decomposition   into ops that have one of the above
//   one by one        the op runs on each sample, and results are stacked; logged once per op
#pragma once
#include <string>
#include <vector>

#include "core/autograd/level.h"

namespace tessera {

/// Results of `prim` at `level`, which is one of vmap. Operands are tensors of the level outside;
/// where bit i of `batched` is set, dim 0 of operand i is the batch.
Tensors run_batched(Level& level, const PrimRef& prim, std::span<Tensor> in,
                    std::span<const bool> batched);

/// Names of the ops that have run one by one in this process.
std::vector<std::string> ops_batched_one_by_one();

}  // namespace tessera
