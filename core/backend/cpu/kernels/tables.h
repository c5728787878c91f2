// The function tables that kernels/ files fill, one struct per family. Plain pointers and integers only.
#pragma once
#include <cstddef>
#include <cstdint>

namespace tessera::cpu {

/// One row of a strided loop: p[0] is the result, then the operands; strides in bytes; n elements.
using Loop = void (*)(char* const* p, const int64_t* stride, int64_t n);

/// Loops of one pointwise functor by compute type; null where the functor has none for it. `to_bool`: results are bool.
struct PointwiseLoops {
  const char* name;
  int arity;
  bool to_bool;
  Loop f32, f64, i64;
};
struct PointwiseTable {
  const PointwiseLoops* rows;
  size_t count;
};

/// dst[i] = src[i] converted, n elements with byte strides; rows[from][to] in DType order.
struct ConvertTable {
  using Fn = void (*)(char* dst, int64_t dst_stride, const char* src, int64_t src_stride, int64_t n);
  const Fn* rows[8];
};

/// Reduces x [outer, n, inner] to out [outer, inner], for outer index in [begin, end).
struct ReduceTable {
  using F32 = void (*)(const float* x, float* out, int64_t n, int64_t inner, int64_t begin, int64_t end);
  using F64 = void (*)(const double* x, double* out, int64_t n, int64_t inner, int64_t begin, int64_t end);
  using I64 = void (*)(const int64_t* x, int64_t* out, int64_t n, int64_t inner, int64_t begin, int64_t end);
  F32 f32[6];  // by ReduceKind
  F64 f64[6];
  I64 i64[6];
};

}  // namespace tessera::cpu
