// What the scalar functors ask of a compiler: exact bit casts, one fused multiply-add, rounding and
// square root. Included before the other files of this folder (or printed in front of them by the
// code generators); none of them, this one included, includes anything. Invariant: every function
// here is exact or correctly rounded, so the same source gives the same bits with AVX2, AVX-512 and
// CUDA (x86-64 without a fused multiply-add comes very close, see fma), provided that the compiler
// neither contracts nor reassociates: -ffp-contract=off (CUDA: -fmad=false), never -ffast-math. For
// vector code add -fno-math-errno -fno-trapping-math. All functions have internal linkage because
// one binary holds them for several instruction sets.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define TESSERA_FN static __device__ __forceinline__
#define TESSERA_TABLE static __device__ const
#else
#define TESSERA_FN static inline __attribute__((always_inline))
#define TESSERA_TABLE constexpr
#endif

namespace tessera::fn {

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)

TESSERA_FN int bits(float x) { return __float_as_int(x); }
TESSERA_FN float from_bits(int i) { return __int_as_float(i); }
TESSERA_FN long long bits(double x) { return __double_as_longlong(x); }
TESSERA_FN double from_bits64(long long i) { return __longlong_as_double(i); }
TESSERA_FN float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
TESSERA_FN double fma(double a, double b, double c) { return __fma_rn(a, b, c); }
TESSERA_FN float sqrt(float x) { return __fsqrt_rn(x); }
TESSERA_FN double sqrt(double x) { return __dsqrt_rn(x); }
TESSERA_FN float abs(float x) { return ::fabsf(x); }
TESSERA_FN double abs(double x) { return ::fabs(x); }
TESSERA_FN float copysign(float x, float s) { return ::copysignf(x, s); }
TESSERA_FN double copysign(double x, double s) { return ::copysign(x, s); }
TESSERA_FN float rint(float x) { return ::rintf(x); }
TESSERA_FN double rint(double x) { return ::rint(x); }
TESSERA_FN float floor(float x) { return ::floorf(x); }
TESSERA_FN double floor(double x) { return ::floor(x); }
TESSERA_FN float ceil(float x) { return ::ceilf(x); }
TESSERA_FN double ceil(double x) { return ::ceil(x); }
TESSERA_FN float trunc(float x) { return ::truncf(x); }
TESSERA_FN double trunc(double x) { return ::trunc(x); }

// Guards work whose result is used only where `needed` holds. A GPU branches around it; vector code
// has to do it anyway.
TESSERA_FN bool rare(bool needed) { return needed; }

#define TESSERA_LIBM(name) ::name

#else  // GCC and Clang

TESSERA_FN int bits(float x) { return __builtin_bit_cast(int, x); }
TESSERA_FN float from_bits(int i) { return __builtin_bit_cast(float, i); }
TESSERA_FN long long bits(double x) { return __builtin_bit_cast(long long, x); }
TESSERA_FN double from_bits64(long long i) { return __builtin_bit_cast(double, i); }
TESSERA_FN float sqrt(float x) { return __builtin_sqrtf(x); }
TESSERA_FN double sqrt(double x) { return __builtin_sqrt(x); }
TESSERA_FN float abs(float x) { return __builtin_fabsf(x); }
TESSERA_FN double abs(double x) { return __builtin_fabs(x); }
TESSERA_FN float copysign(float x, float s) { return __builtin_copysignf(x, s); }
TESSERA_FN double copysign(double x, double s) { return __builtin_copysign(x, s); }
TESSERA_FN float floor(float x) { return __builtin_floorf(x); }
TESSERA_FN double floor(double x) { return __builtin_floor(x); }
TESSERA_FN float ceil(float x) { return __builtin_ceilf(x); }
TESSERA_FN double ceil(double x) { return __builtin_ceil(x); }
TESSERA_FN float trunc(float x) { return __builtin_truncf(x); }
TESSERA_FN double trunc(double x) { return __builtin_trunc(x); }
TESSERA_FN bool rare(bool) { return true; }

#define TESSERA_LIBM(name) __builtin_##name

#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
TESSERA_FN float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
// No instruction for it (x86-64 before 2013): the product is exact in double and the sum is rounded
// there first, which differs from a true fma in the last place in about one sum of 2^29. Removing
// that (rounding to odd) costs ten times as much as everything else here, and libm's fmaf more.
TESSERA_FN float fma(float a, float b, float c) {
  return static_cast<float>(static_cast<double>(a) * b + c);
}
#endif
TESSERA_FN double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }

#if defined(__SSE4_1__) || defined(__aarch64__)
TESSERA_FN float rint(float x) { return __builtin_rintf(x); }
TESSERA_FN double rint(double x) { return __builtin_rint(x); }
#else
// Adding and subtracting 2^23 (2^52) leaves the nearest integer; larger numbers are integers
// already.
TESSERA_FN float rint(float x) {
  const float a = abs(x), r = (a + 8388608.0f) - 8388608.0f;
  return a < 8388608.0f ? copysign(r, x) : x;
}
TESSERA_FN double rint(double x) {
  const double a = abs(x), r = (a + 4503599627370496.0) - 4503599627370496.0;
  return a < 4503599627370496.0 ? copysign(r, x) : x;
}
#endif

#endif  // CUDA or not

// Sixteen floats that a function chooses from, by the low four bits of an index: one permutation of
// a register where there are groups of floats (group.h). An index comes as a float whose low bits
// count, as they do once a number has been added that leaves its place to integers alone.
struct Table {
  alignas(64) float of[16];
};
TESSERA_FN float lookup(const Table& table, float index) { return table.of[bits(index) & 15]; }
// The bits of x plus those of `by`, moved up so many places: by way of the exponent, a product with
// a power of two.
TESSERA_FN float raised(float x, float by, int places) {
  return from_bits(static_cast<int>(static_cast<unsigned>(bits(x)) +
                                    (static_cast<unsigned>(bits(by)) << places)));
}

// x with its sign changed where s has one.
TESSERA_FN float flipped(float x, float s) { return from_bits(bits(x) ^ (bits(s) & ~0x7fffffff)); }
// far(x) where |x| > bound, which is rare; else `near`. Groups compute it only if they hold such.
template <float (*kFar)(float)>
TESSERA_FN float beyond(float bound, float x, float near) {
  return abs(x) > bound ? kFar(x) : near;
}

TESSERA_FN float inf() { return from_bits(0x7f800000); }
TESSERA_FN float nan() { return from_bits(0x7fc00000); }

}  // namespace tessera::fn
