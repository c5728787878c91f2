// Reads, writes and converts single elements, for scalars, printing and tests; kernels have loops
// of their own.
#pragma once
#include <bit>
#include <cstdint>

#include "core/tensor/dtype.h"

namespace tessera {

constexpr float to_float(BFloat16 x) { return std::bit_cast<float>(uint32_t(x.bits) << 16); }
float to_float(Half x);
float to_float(Float8E4M3 x);
float to_float(Float8E5M2 x);
/// Round to nearest even; NaN stays NaN.
BFloat16 to_bfloat16(float x);
Half to_half(float x);
Float8E4M3 to_float8_e4m3(float x);
Float8E5M2 to_float8_e5m2(float x);

/// The element at `p`, converted; integers beyond 2^53 lose bits in read_real.
double read_real(const void* p, DType dtype);
int64_t read_integer(const void* p, DType dtype);
/// Writes `value` converted to `dtype`; to bool: value != 0.
void write_real(void* p, DType dtype, double value);
void write_integer(void* p, DType dtype, int64_t value);

}  // namespace tessera
