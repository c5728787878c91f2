// The arithmetic of reductions. Invariant: element i of the result is the balanced binary tree
// ((s0+s1)+(s2+s3))+... over element i of the sources in rank order, whatever the count, the
// backend and the cut into chunks, so equal inputs give equal bits everywhere (numerically this is
// pairwise summation; Higham, Accuracy and Stability of Numerical Algorithms, section 4.2).
#pragma once
#include <cstdint>
#include <span>

#include "collectives/process_group.h"

namespace tessera::detail {

/// True when `op` is defined on `dtype`.
bool reducible(ReduceOp op, DType dtype);

/// dst[i] = op over all sources' element i, for i in [0, count). 16-bit floats are combined in f32
/// and rounded once; kAvg divides once, by `terms`: how many ranks' values went into the sources;
/// 0: one into each. `dst` may be one of the sources.
void reduce_tree(ReduceOp op, DType dtype, void* dst, std::span<const void* const> sources,
                 int64_t count, int terms = 0);
/// The same result in each place of `to`, which may be sources.
void reduce_tree(ReduceOp op, DType dtype, std::span<void* const> to,
                 std::span<const void* const> sources, int64_t count, int terms = 0);

}  // namespace tessera::detail
