// Walks several strided operands in step: dims are reordered and merged so that the innermost row
// is as long and as dense as the operands allow, then one loop function runs row by row. Invariant:
// rows never overlap in the result.
#pragma once
#include "core/backend/cpu/kernels/tables.h"
#include "core/base/function_ref.h"
#include "core/tensor/tensor.h"

namespace tessera::cpu {

inline constexpr int kMaxWalked = 5;  // result and up to four operands

struct Walk {
  int operands = 0;
  int ndim = 0;   // dims outside the row
  int64_t n = 0;  // row length
  int64_t extent[kMaxDims];
  int64_t stride[kMaxWalked][kMaxDims];  // bytes
  int64_t row_stride[kMaxWalked];        // bytes
  char* base[kMaxWalked];
  int64_t rows() const {
    int64_t r = 1;
    for (int d = 0; d < ndim; ++d) r *= extent[d];
    return r;
  }
};

/// tensors[0] is the result; the others broadcast to its shape.
Walk make_walk(std::span<const Tensor* const> tensors);
/// Calls row(pointers, row_strides, n) for every row (long rows are cut), in parallel where that
/// pays.
void run_walk(const Walk& walk, FunctionRef<void(char* const*, const int64_t*, int64_t)> row);

}  // namespace tessera::cpu
