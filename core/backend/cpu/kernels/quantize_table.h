// The functions that kernels/quantize.cpp fills. Plain pointers and integers only.
#pragma once
#include <cstdint>

namespace tessera::cpu {

struct QuantizeTable {
  /// y = round(x inverse) + zero_point within 0..255, half to even; NaN gives 0.
  void (*quantize)(const float* x, uint8_t* y, int64_t n, float inverse, int32_t zero_point);
  /// y = (x - zero_point) scale
  void (*dequantize)(const uint8_t* x, float* y, int64_t n, float scale, int32_t zero_point);
};

}  // namespace tessera::cpu
