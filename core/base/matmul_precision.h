// How products of f32 may be computed, for the whole process. Where nothing is asked for, they are
// f32 throughout. Invariant: this is permission, not a promise: devices without another way, such
// as CPUs, ignore it.
#pragma once
#include <cstdint>
#include <string_view>

namespace tessera {

enum class MatmulPrecision : uint8_t {
  kHighest,  // operands keep their 24 bits of mantissa
  kHigh,     // TF32: operands are rounded to 11, and sums are in f32
};

/// Sets it for products that run from now on, of all threads: "highest" or "high", which PyTorch
/// calls so too. Throws UserError for other names.
void set_float32_matmul_precision(std::string_view name);
MatmulPrecision float32_matmul_precision();

}  // namespace tessera
