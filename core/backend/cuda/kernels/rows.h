// The host's side of rows.cu, norm_grad.cu and losses.cu: how a row of n elements is held, and
// geometry.
#pragma once
#include <cstdint>

#include "core/backend/cuda/kernels/parameters.h"
#include "core/backend/cuda/kernels/text.h"
#include "core/tensor/dtype.h"

namespace tessera::cuda {

/// Threads of a row and elements that each keeps; 0 elements: the row is read at each pass.
struct RowHold {
  int threads, items;
};
/// All that there are for a dtype, the shortest rows first.
std::span<const RowHold> row_holds(DType dtype);
std::span<const RowHold> norm_grad_holds(DType dtype);
std::span<const RowHold> loss_holds(DType dtype);
/// The first of them that has room for n elements.
RowHold hold_of(std::span<const RowHold> holds, int64_t n);
/// That of gradients of norms; `aligned`: the first rows are at multiples of 16 bytes. Rows that do
/// not come in packs are read at each pass by a block, which is several times slower.
RowHold norm_grad_hold(DType dtype, int64_t n, bool aligned);

/// Entries softmax, log_softmax, softmax_grad, log_softmax_grad, layer_norm, rms_norm.
Instance rows_instance(DType dtype, RowHold hold);
/// Entries layer_norm_grad, rms_norm_grad; norm_sums for those of no items.
Instance norm_grad_instance(DType dtype, RowHold hold);
/// Entries count, rows, finish; count and finish are one block and the same in all of a dtype.
Instance loss_instance(DType dtype, RowHold hold);

/// The launch of an entry that works on one row after another: every entry but norm_sums, count and
/// finish, and gradients of norms whose holds have items.
Geometry rows_geometry(RowHold hold, int64_t rows);
/// Whether rows of n elements that begin at multiples of 16 bytes can be read in packs.
bool rows_in_packs(DType dtype, RowHold hold, int64_t n);

/// Gradients of norms: rows of a piece, pieces, and the launch that makes partial sums [pieces, n],
/// which are then reduced as [1, pieces, n] (reduce.h). It is that of the gradient or, where the
/// hold has no items, of norm_sums.
struct NormSums {
  unsigned piece, pieces;
  Geometry geometry;
};
NormSums norm_sums(RowHold hold, int64_t rows, int64_t n);

}  // namespace tessera::cuda
