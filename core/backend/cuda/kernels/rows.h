// The host's side of rows.cu and losses.cu: how a row of n elements is held, and geometry.
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
RowHold hold_of(DType dtype, int64_t n);

/// Entries softmax, log_softmax, softmax_grad, log_softmax_grad, layer_norm, rms_norm,
/// layer_norm_grad, rms_norm_grad; norm_sums is the same in all instances of a dtype.
Instance rows_instance(DType dtype, RowHold hold);
/// Entries count, rows, finish; count and finish are one block and the same in all of a dtype.
Instance loss_instance(DType dtype, RowHold hold);

/// The launch of an entry that works on one row after another: every entry but norm_sums, count and
/// finish.
Geometry rows_geometry(RowHold hold, int64_t rows);
/// Whether rows of n elements that begin at multiples of 16 bytes can be read in packs.
bool rows_in_packs(DType dtype, RowHold hold, int64_t n);

/// norm_sums: rows of a piece, pieces, and the launch; partial sums [pieces, n] are then reduced as
/// [1, pieces, n] (reduce.h).
struct NormSums {
  unsigned piece, pieces;
  Geometry geometry;
};
NormSums norm_sums(int64_t rows, int64_t n);

}  // namespace tessera::cuda
