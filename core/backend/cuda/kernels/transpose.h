// The host's side of transpose.cu: which copies go by tiles, and their launches.
#pragma once
#include "core/backend/cuda/kernels/walk.h"

namespace tessera::cuda {

/// Entry `tiles` for elements of 1, 2, 4 or 8 bytes, whatever they are: their bits are kept.
Instance transpose_instance(int bytes);

/// One launch of that entry.
struct TransposeLaunch {
  Geometry geometry;
  TransposeCall call;
};
/// Launches that copy `in` to `out` over `extents`; none where the innermost dim of both is the
/// same, where one has no dense one, or where tiles would be nearly empty.
std::vector<TransposeLaunch> transpose_launches(std::span<const int64_t> extents,
                                                const Strided& out, const Strided& in);

}  // namespace tessera::cuda
