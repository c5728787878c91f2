// 16-bit and 8-bit floats as storage, without tables or branches, so that loops over them
// vectorise: widening is exact, narrowing rounds to nearest even and keeps NaN (include prelude.h
// first).
namespace tessera::fn {

struct F16 {
  unsigned short bits;
};
struct BF16 {
  unsigned short bits;
};
struct F8E4M3 {
  unsigned char bits;
};
struct F8E5M2 {
  unsigned char bits;
};

TESSERA_FN unsigned word(float x) { return static_cast<unsigned>(bits(x)); }
TESSERA_FN float from_word(unsigned x) { return from_bits(static_cast<int>(x)); }

TESSERA_FN float widen(BF16 x) { return from_word(static_cast<unsigned>(x.bits) << 16); }
// Shifts the exponent into place, then repairs denormals and infinities by selects.
TESSERA_FN float widen(F16 x) {
  const unsigned sign = (x.bits & 0x8000u) << 16, rest = (x.bits & 0x7fffu) << 13;
  const float scaled = from_word(rest) * from_word(0x77800000u);  // 2^112; exact, denormals too
  const unsigned special = word(scaled) | 0x7f800000u;
  return from_word((rest >= 0x0f800000u ? special : word(scaled)) | sign);
}

// Denormals become the last bits of a number that is then subtracted: a product with a denormal, as
// for f16, would be slow, and these formats have many.
TESSERA_FN float widen(F8E4M3 x) {
  const unsigned sign = (x.bits & 0x80u) << 24, a = x.bits & 0x7fu;
  const unsigned small = word(from_word(a | 0x46800000u) - 16384.f);
  const unsigned finite = a < 8 ? small : (a << 20) + 0x3c000000u;
  return from_word((a == 0x7fu ? 0x7fc00000u : finite) | sign);
}
TESSERA_FN float widen(F8E5M2 x) {
  const unsigned sign = (x.bits & 0x80u) << 24, a = x.bits & 0x7fu;
  const unsigned small = word(from_word(a | 0x43000000u) - 128.f);
  const unsigned finite = a < 4 ? small : (a << 21) + 0x38000000u;
  const unsigned special = a > 0x7cu ? 0x7fc00000u : 0x7f800000u;
  return from_word((a >= 0x7cu ? special : finite) | sign);
}

TESSERA_FN BF16 to_bf16(float f) {
  const unsigned x = word(f), rounded = (x + 0x7fffu + ((x >> 16) & 1)) >> 16;
  return {static_cast<unsigned short>(f != f ? (x >> 16) | 0x40u : rounded)};
}
TESSERA_FN F16 to_f16(float f) {
  const unsigned x = word(f), sign = (x >> 16) & 0x8000u, a = x & 0x7fffffffu;
  // Denormal results: adding 0.5 aligns the mantissa so that the addition itself rounds.
  const unsigned small = word(from_word(a) + 0.5f) - 0x3f000000u;
  const unsigned normal = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1)) >> 13;
  const unsigned finite = a < 0x38800000u ? small : normal;
  const unsigned big = a > 0x7f800000u ? 0x7e00u : 0x7c00u;
  return {static_cast<unsigned short>(sign | (a >= 0x477ff000u ? big : finite))};
}
// As to_f16; what is rounded beyond 448 becomes NaN.
TESSERA_FN F8E4M3 to_f8e4m3(float f) {
  const unsigned x = word(f), sign = (x >> 24) & 0x80u, a = x & 0x7fffffffu;
  const unsigned small = word(from_word(a) + 16384.f) - 0x46800000u;
  const unsigned normal = (a - 0x3c000000u + 0x7ffffu + ((a >> 20) & 1)) >> 20;
  const unsigned finite = a < 0x3c800000u ? small : normal;
  return {static_cast<unsigned char>(sign | (a >= 0x43f00000u ? 0x7fu : finite))};
}
// As to_f16; what is rounded beyond 57344 becomes infinite.
TESSERA_FN F8E5M2 to_f8e5m2(float f) {
  const unsigned x = word(f), sign = (x >> 24) & 0x80u, a = x & 0x7fffffffu;
  const unsigned small = word(from_word(a) + 128.f) - 0x43000000u;
  const unsigned normal = (a - 0x38000000u + 0xfffffu + ((a >> 21) & 1)) >> 21;
  const unsigned finite = a < 0x38800000u ? small : normal;
  const unsigned big = a > 0x7f800000u ? 0x7fu : 0x7cu;
  return {static_cast<unsigned char>(sign | (a >= 0x47800000u ? big : finite))};
}

}  // namespace tessera::fn
