// Conversions between every two dtypes: dense rows vectorise, others take the strided loop.
#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/kernels/tables.h"

namespace tessera::cpu {
namespace {

// Storage types in DType order; the 16-bit floats are told apart by these wrappers.
struct F16 {
  uint16_t bits;
};
struct BF16 {
  uint16_t bits;
};

template <class To, class From>
inline To bit_cast(From x) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, x);
}

inline float widen(BF16 x) { return bit_cast<float>(uint32_t(x.bits) << 16); }
// Half to float without tables: shift the exponent into place, then repair denormals and infinities
// by selects.
inline float widen(F16 x) {
  uint32_t sign = uint32_t(x.bits & 0x8000u) << 16, rest = uint32_t(x.bits & 0x7fffu) << 13;
  float scaled =
      bit_cast<float>(rest) * bit_cast<float>(0x77800000u);  // 2^112; exact, denormals included
  uint32_t special = bit_cast<uint32_t>(scaled) | 0x7f800000u;
  uint32_t bits = rest >= 0x0f800000u ? special : bit_cast<uint32_t>(scaled);
  return bit_cast<float>(bits | sign);
}
inline BF16 to_bf16(float f) {
  uint32_t x = bit_cast<uint32_t>(f);
  uint32_t rounded = (x + 0x7fffu + ((x >> 16) & 1)) >> 16;
  return {uint16_t(f != f ? (x >> 16) | 0x40u : rounded)};
}
inline F16 to_f16(float f) {
  uint32_t x = bit_cast<uint32_t>(f), sign = (x >> 16) & 0x8000u, a = x & 0x7fffffffu;
  // Denormal results: adding 0.5 aligns the mantissa so that the addition itself rounds to nearest
  // even.
  uint32_t small = bit_cast<uint32_t>(bit_cast<float>(a) + 0.5f) - 0x3f000000u;
  uint32_t normal = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1)) >> 13;
  uint32_t finite = a < 0x38800000u ? small : normal;
  uint32_t big = a > 0x7f800000u ? 0x7e00u : 0x7c00u;
  return {uint16_t(sign | (a >= 0x477ff000u ? big : finite))};
}

template <class T>
inline T widen(T x) {
  return x;
}
template <class To>
struct Narrow {
  template <class F>
  static To from(F x) {
    return To(x);
  }
};
template <>
struct Narrow<bool> {
  template <class F>
  static bool from(F x) {
    return x != F(0);
  }
};
template <>
struct Narrow<uint8_t> {
  template <class F>
  static uint8_t from(F x) {
    return uint8_t(int64_t(x));
  }
};
template <>
struct Narrow<BF16> {
  template <class F>
  static BF16 from(F x) {
    return to_bf16(float(x));
  }
};
template <>
struct Narrow<F16> {
  template <class F>
  static F16 from(F x) {
    return to_f16(float(x));
  }
};

template <class From, class To>
void convert(char* dst, int64_t ds, const char* src, int64_t ss, int64_t n) {
  if (ds == int64_t(sizeof(To)) && ss == int64_t(sizeof(From))) {
    To* d = reinterpret_cast<To*>(dst);
    const From* s = reinterpret_cast<const From*>(src);
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) d[i] = Narrow<To>::from(widen(s[i]));
    return;
  }
  for (int64_t i = 0; i < n; ++i)
    *reinterpret_cast<To*>(dst + i * ds) =
        Narrow<To>::from(widen(*reinterpret_cast<const From*>(src + i * ss)));
}

template <class From>
struct Row {
  static constexpr ConvertTable::Fn to[8] = {
      convert<From, bool>, convert<From, uint8_t>, convert<From, int32_t>, convert<From, int64_t>,
      convert<From, F16>,  convert<From, BF16>,    convert<From, float>,   convert<From, double>};
};

}  // namespace

template <>
const ConvertTable& isa_table<ConvertTable, isa::TESSERA_ISA>() {
  static const ConvertTable table{{Row<bool>::to, Row<uint8_t>::to, Row<int32_t>::to,
                                   Row<int64_t>::to, Row<F16>::to, Row<BF16>::to, Row<float>::to,
                                   Row<double>::to}};
  return table;
}

}  // namespace tessera::cpu
