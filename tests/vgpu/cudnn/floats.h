// Numbers of 16 bits and their rounding.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

namespace vgpu::dnn {

inline float of_half(uint16_t bits) { return static_cast<float>(std::bit_cast<_Float16>(bits)); }
inline uint16_t to_half(float x) { return std::bit_cast<uint16_t>(static_cast<_Float16>(x)); }
inline float of_bfloat(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }
inline uint16_t to_bfloat(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  if (std::isnan(x)) return static_cast<uint16_t>(bits >> 16 | 64);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
/// Ten bits of mantissa, to nearest and ties away from zero, as cvt.rna.tf32 rounds.
inline float to_tf32(float x) {
  if (!std::isfinite(x)) return x;
  return std::bit_cast<float>((std::bit_cast<uint32_t>(x) + 0x1000u) & ~0x1fffu);
}

}  // namespace vgpu::dnn
