// The host's side of matmul.cu: instances, and the launches of a batch of products.
#pragma once
#include <cstdint>

#include "core/backend/cuda/kernels/walk.h"
#include "core/tensor/dtype.h"

namespace tessera::cuda {

/// Instances with the entry `matmul`, whose operands all have this dtype. 16-bit floats use the
/// matrix units, but for exact sums.
std::vector<Instance> matmul_instances(DType dtype);

/// A batch of matrices: strides in elements of a matrix's rows and columns, and of the batch's
/// dims.
struct Matrices {
  const void* data;
  int64_t row, column;
  std::span<const int64_t> batch;
};
/// How products are summed: in one chain; with `leaves` > 0 in the tree of so many chains, which
/// divides k and is a power of two up to 2^kMatmulLevels; or with `parts` > 1 in so many chains of
/// equal length (but for the last) that are written apart, part p `part_stride` elements behind C.
/// `wide`: C is f32 where the dtype is a 16-bit float; not for leaves.
struct MatmulSum {
  int64_t leaves = 0, parts = 1, part_stride = 0;
  bool wide = false;
};
/// Parts that are worth it for this product: more than one where few blocks would have long sums.
/// Depends on the sizes alone.
int64_t matmul_parts(DType dtype, int64_t batch, int64_t m, int64_t n, int64_t k);

struct MatmulLaunch {
  std::string instance;
  Geometry geometry;
  MatmulCall call;
};
/// c = a b for every position of a batch of extents `batch` (empty: one product); a is [m, k], b is
/// [k, n]. Launches that together do all; none where the result has no elements.
std::vector<MatmulLaunch> matmul_launches(DType dtype, std::span<const int64_t> batch, int64_t m,
                                          int64_t n, int64_t k, const Matrices& c,
                                          const Matrices& a, const Matrices& b,
                                          const MatmulSum& sum = {});

}  // namespace tessera::cuda
