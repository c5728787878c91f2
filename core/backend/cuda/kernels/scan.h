// The host's side of scan.cu, pool.cu, conv.cu and batch_norm.cu: instances and geometry. Pooling
// and convolution kernels have one thread an element of what they write: cover(count, 256).
#pragma once
#include <cstdint>

#include "core/backend/cuda/kernels/parameters.h"
#include "core/backend/cuda/kernels/text.h"
#include "core/tensor/dtype.h"

namespace tessera::cuda {

/// op: cumsum, cumprod, cummax, cummin; logcumsumexp and linear_scan of floats.
Instance scan_instance(std::string_view op, DType dtype);
/// The entry that scans lines, which are lines, blocks or warps, and its geometry.
struct ScanLaunch {
  const char* entry;
  Geometry geometry;
};
/// Sets `packs` of the call, whose results have the same bits by blocks and by warps.
ScanLaunch scan_launch(std::string_view op, DType dtype, ScanCall& call);

/// Entries max_pool, max_pool_grad, avg_pool, avg_pool_grad.
Instance pool_instance(DType dtype);

/// Entries gather, gather_packs and collect.
Instance conv_instance(DType dtype);

/// Entries moments, normalize, grad_sums, masked_sums and grad with this geometry; join_moments,
/// moments_of_sums and join_sums have a thread for each channel: cover(channels, 256).
Instance batch_norm_instance(DType dtype);
struct BatchNormPieces {
  unsigned piece, pieces;  // rows of a piece
  Geometry geometry;
};
BatchNormPieces batch_norm_pieces(int64_t rows, int64_t channels);

}  // namespace tessera::cuda
