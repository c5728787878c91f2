// f32 to u8 and back. Values are clamped before they are rounded, which the limits, being integers,
// do not see; what is left is small enough to be rounded by adding 1.5 2^23.
#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/kernels/quantize_table.h"

namespace tessera::cpu {
namespace {

constexpr float kRounder = 12582912.0f;

void quantize(const float* x, uint8_t* y, int64_t n, float inverse, int32_t zero_point) {
  const float low = float(-zero_point), high = float(255 - zero_point);
  for (int64_t i = 0; i < n; ++i) {
    float v = x[i] * inverse;
    v = v > low ? v : low;
    v = v < high ? v : high;
    y[i] = uint8_t(int32_t((v + kRounder) - kRounder) + zero_point);
  }
}

void dequantize(const uint8_t* x, float* y, int64_t n, float scale, int32_t zero_point) {
  for (int64_t i = 0; i < n; ++i) y[i] = float(int32_t(x[i]) - zero_point) * scale;
}

}  // namespace

template <>
const QuantizeTable& isa_table<QuantizeTable, isa::TESSERA_ISA>() {
  static const QuantizeTable table{quantize, dequantize};
  return table;
}

}  // namespace tessera::cpu
