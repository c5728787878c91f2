// The host's side of reduce.cu, extreme.cu and bits_hash.cu: instances, and the launches of a
// reduction of [outer, n, inner]. Several runs of reduced dims are reduced one after the other,
// innermost first.
#pragma once
#include <cstdint>

#include "core/backend/cuda/kernels/parameters.h"
#include "core/backend/cuda/kernels/text.h"
#include "core/tensor/dtype.h"

namespace tessera::cuda {

/// `join` is the op's name: sum, prod, amax, amin, any, all.
Instance reduce_instance(std::string_view join, DType in, DType out);
/// Entry `positions`; results are i64.
Instance extreme_instance(bool largest, DType in);

/// Entries `blocks`, of any number of blocks of 256 threads, and `join`, of one; `in` of the first
/// is aligned to `bytes`: 1, 2, 4 or 8.
Instance bits_hash_instance(int bytes);

/// One launch. All but the last write partial results [outer, pieces, inner] of `partial` elements
/// in the compute type, which the next reads with n = pieces; pointers are for the caller to set.
struct ReduceLaunch {
  const char* entry;
  Geometry geometry;
  ReduceCall call;
  int64_t partial;
};
/// `aligned`: the operand begins at a multiple of 16 bytes, as partial results must. outer * inner
/// and n are below 2^31.
std::vector<ReduceLaunch> reduce_launches(int64_t outer, int64_t n, int64_t inner, DType in,
                                          DType partial, bool aligned);
ReduceLaunch extreme_launch(int64_t outer, int64_t n, int64_t inner);

}  // namespace tessera::cuda
