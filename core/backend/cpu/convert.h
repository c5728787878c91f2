// Rows of elements converted between dtypes; floats of 16 and 8 bits round to nearest even, floats
// to integers truncate.
#pragma once
#include <cstdint>

#include "core/tensor/dtype.h"

namespace tessera::cpu {

/// dst[i] = src[i] for n elements with byte strides.
using ConvertLoop = void (*)(char* dst, int64_t dst_stride, const char* src, int64_t src_stride,
                             int64_t n);
ConvertLoop convert_loop(DType from, DType to);

/// The type that arithmetic on `t` is done in: f32 for 16-bit floats, i64 for integers and bool.
constexpr DType compute_dtype(DType t) { return t == kF64 ? kF64 : is_floating(t) ? kF32 : kI64; }

}  // namespace tessera::cpu
