// The arithmetic of reductions. Invariant: element i of the result is the balanced binary tree
// ((s0+s1)+(s2+s3))+... over element i of the sources in rank order, whatever the count, the
// backend and the division into chunks, so equal inputs give equal bits everywhere (numerically
// this is pairwise summation; Higham, Accuracy and Stability of Numerical Algorithms, section 4.2).
#pragma once
#include <cstdint>
#include <span>

#include "collectives/process_group.h"

namespace tessera::detail {

/// True when `op` is defined on `dtype`.
bool reducible(ReduceOp op, DType dtype);

/// Sets dst[i] to op over element i of all sources, for i in [0, count). 16-bit floats are combined
/// in f32 and rounded once. kAvg divides once, by `terms`, the number of ranks whose values went
/// into the sources; 0: one rank for each source. `dst` may be one of the sources.
void reduce_tree(ReduceOp op, DType dtype, void* dst, std::span<const void* const> sources,
                 int64_t count, int terms = 0);
/// Writes the same result to each place of `to`; these may be sources.
void reduce_tree(ReduceOp op, DType dtype, std::span<void* const> to,
                 std::span<const void* const> sources, int64_t count, int terms = 0);

}  // namespace tessera::detail
