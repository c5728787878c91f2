// The host's side of matmul.cu: instances, and the launch of a batch of products.
#pragma once
#include <cstdint>

#include "core/backend/cuda/kernels/walk.h"
#include "core/tensor/dtype.h"

namespace tessera::cuda {

/// Entry `matmul`; all operands have this dtype. 16-bit floats use the matrix units.
Instance matmul_instance(DType dtype);

/// A batch of matrices: strides in elements of a matrix's rows and columns, and of the batch's
/// dims.
struct Matrices {
  const void* data;
  int64_t row, column;
  std::span<const int64_t> batch;
};
struct MatmulLaunch {
  Geometry geometry;
  MatmulCall call;
};
/// c = a b for every position of a batch of extents `batch` (empty: one product); a is [m, k], b is
/// [k, n]. Launches that together do all; none where the result has no elements.
std::vector<MatmulLaunch> matmul_launches(DType dtype, std::span<const int64_t> batch, int64_t m,
                                          int64_t n, int64_t k, const Matrices& c,
                                          const Matrices& a, const Matrices& b, bool accumulate);

}  // namespace tessera::cuda
