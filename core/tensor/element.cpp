#include "core/tensor/element.h"

#include <cmath>

namespace tessera {
namespace {

template <class T>
double read_as(const void* p) {
  return double(*static_cast<const T*>(p));
}
template <class T>
void write_as(void* p, T v) {
  *static_cast<T*>(p) = v;
}

}  // namespace

float to_float(Half x) {
  int exponent = x.bits >> 10 & 31, mantissa = x.bits & 1023;
  float magnitude = exponent == 31 ? (mantissa ? NAN : INFINITY)
                    : exponent     ? std::ldexp(float(mantissa + 1024), exponent - 25)
                                   : std::ldexp(float(mantissa), -24);
  return x.bits & 0x8000 ? -magnitude : magnitude;
}

float to_float(Float8E4M3 x) {
  int exponent = x.bits >> 3 & 15, mantissa = x.bits & 7;
  float magnitude = exponent == 15 && mantissa == 7 ? NAN
                    : exponent                      ? std::ldexp(float(mantissa + 8), exponent - 10)
                                                    : std::ldexp(float(mantissa), -9);
  return x.bits & 0x80 ? -magnitude : magnitude;
}

float to_float(Float8E5M2 x) { return to_float(Half{uint16_t(x.bits << 8)}); }

BFloat16 to_bfloat16(float f) {
  uint32_t x = std::bit_cast<uint32_t>(f);
  if (f != f) return {uint16_t(x >> 16 | 0x40)};
  return {uint16_t((x + 0x7fff + (x >> 16 & 1)) >> 16)};
}

Half to_half(float f) {
  uint32_t x = std::bit_cast<uint32_t>(f), sign = x >> 16 & 0x8000, a = x & 0x7fffffff;
  if (a > 0x7f800000) return {uint16_t(sign | 0x7e00)};
  if (a >= 0x477ff000) return {uint16_t(sign | 0x7c00)};
  if (a >= 0x38800000) return {uint16_t(sign | ((a - 0x38000000 + 0xfff + (a >> 13 & 1)) >> 13))};
  // A denormal: adding 0.5 puts its last bit at the end of the mantissa, so the addition rounds it
  // to nearest even.
  return {uint16_t(sign | (std::bit_cast<uint32_t>(std::bit_cast<float>(a) + 0.5f) - 0x3f000000))};
}

// As to_half, with an addend that puts the last bit of a denormal at the end of the mantissa.
Float8E4M3 to_float8_e4m3(float f) {
  uint32_t x = std::bit_cast<uint32_t>(f), sign = x >> 24 & 0x80, a = x & 0x7fffffff;
  if (a >= 0x43f00000) return {uint8_t(sign | 0x7f)};  // 480; what rounds to it is NaN, too
  if (a >= 0x3c800000) return {uint8_t(sign | ((a - 0x3c000000 + 0x7ffff + (a >> 20 & 1)) >> 20))};
  return {
      uint8_t(sign | (std::bit_cast<uint32_t>(std::bit_cast<float>(a) + 0x1p14f) - 0x46800000))};
}

Float8E5M2 to_float8_e5m2(float f) {
  uint32_t x = std::bit_cast<uint32_t>(f), sign = x >> 24 & 0x80, a = x & 0x7fffffff;
  if (a > 0x7f800000) return {uint8_t(sign | 0x7f)};
  if (a >= 0x47800000) return {uint8_t(sign | 0x7c)};
  if (a >= 0x38800000) return {uint8_t(sign | ((a - 0x38000000 + 0xfffff + (a >> 21 & 1)) >> 21))};
  return {uint8_t(sign | (std::bit_cast<uint32_t>(std::bit_cast<float>(a) + 0x1p7f) - 0x43000000))};
}

double read_real(const void* p, DType dtype) {
  switch (dtype) {
    case kBool:
    case kU8: return read_as<uint8_t>(p);
    case kI32: return read_as<int32_t>(p);
    case kI64: return read_as<int64_t>(p);
    case kF16: return to_float(*static_cast<const Half*>(p));
    case kBF16: return to_float(*static_cast<const BFloat16*>(p));
    case kF32: return read_as<float>(p);
    case kF8E4M3: return to_float(*static_cast<const Float8E4M3*>(p));
    case kF8E5M2: return to_float(*static_cast<const Float8E5M2*>(p));
    case kF64: return read_as<double>(p);
  }
  return 0;
}

int64_t read_integer(const void* p, DType dtype) {
  return dtype == kI64 ? *static_cast<const int64_t*>(p) : int64_t(read_real(p, dtype));
}

void write_real(void* p, DType dtype, double v) {
  switch (dtype) {
    case kBool: return write_as<uint8_t>(p, v != 0);
    case kU8: return write_as(p, uint8_t(int64_t(v)));
    case kI32: return write_as(p, int32_t(int64_t(v)));
    case kI64: return write_as(p, int64_t(v));
    case kF16: return write_as(p, to_half(float(v)));
    case kBF16: return write_as(p, to_bfloat16(float(v)));
    case kF32: return write_as(p, float(v));
    case kF8E4M3: return write_as(p, to_float8_e4m3(float(v)));
    case kF8E5M2: return write_as(p, to_float8_e5m2(float(v)));
    case kF64: return write_as(p, v);
  }
}

void write_integer(void* p, DType dtype, int64_t v) {
  if (dtype == kI64) return write_as(p, v);
  if (dtype == kI32) return write_as(p, int32_t(v));
  if (dtype == kU8) return write_as(p, uint8_t(v));
  write_real(p, dtype, double(v));
}

}  // namespace tessera
