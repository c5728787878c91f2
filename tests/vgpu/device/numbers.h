// The numbers of CUDA C++: vector types, bit casts, rounding, integer intrinsics, mathematics,
// loads that name a cache, and narrow floats by their bits. It is included by emulate.h, and
// includes no system header: what it needs of libm is declared here. Invariant: what CUDA rounds
// correctly is rounded correctly here; approximations of the card (__expf and its like) are the
// exact function instead.
#pragma once

#define VGPU_VECTOR(type, name, bytes)                      \
  struct alignas(bytes > 16 ? 16 : bytes) name##2 {         \
    type x, y;                                              \
  };                                                        \
  struct name##3 {                                          \
    type x, y, z;                                           \
  };                                                        \
  struct alignas(2 * bytes > 16 ? 16 : 2 * bytes) name##4 { \
    type x, y, z, w;                                        \
  };                                                        \
  VGPU_MAKE(type, name)
#define VGPU_MAKE(type, name)                                                 \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }            \
  inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; } \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
VGPU_VECTOR(signed char, char, 2)
VGPU_VECTOR(unsigned char, uchar, 2)
VGPU_VECTOR(short, short, 4)
VGPU_VECTOR(unsigned short, ushort, 4)
VGPU_VECTOR(int, int, 8)
VGPU_VECTOR(long, long, 16)
VGPU_VECTOR(unsigned long, ulong, 16)
VGPU_VECTOR(long long, longlong, 16)
VGPU_VECTOR(unsigned long long, ulonglong, 16)
VGPU_VECTOR(float, float, 8)
VGPU_VECTOR(double, double, 16)
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
VGPU_MAKE(unsigned, uint)
#undef VGPU_VECTOR
#undef VGPU_MAKE

// ---- bits ----

inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline long long __double_as_longlong(double x) { return __builtin_bit_cast(long long, x); }
inline double __longlong_as_double(long long x) { return __builtin_bit_cast(double, x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __clzll(long long x) {
  return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64;
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline unsigned __brev(unsigned x) {
  unsigned y = 0;
  for (int i = 0; i < 32; ++i) y |= (x >> i & 1) << (31 - i);
  return y;
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
inline int __mulhi(int a, int b) { return static_cast<int>(static_cast<long long>(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline long long __mul64hi(long long a, long long b) {
  return static_cast<long long>(static_cast<__int128>(a) * b >> 64);
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
  return static_cast<unsigned>(((static_cast<unsigned long long>(high) << 32 | low) << (by & 31)) >>
                               32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) >> (by & 31));
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long bytes = static_cast<unsigned long long>(b) << 32 | a;
  unsigned y = 0;
  for (int i = 0; i < 4; ++i)
    y |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return y;
}

// ---- arithmetic that names its rounding ----

inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
inline double __dsqrt_rn(double x) { return __builtin_sqrt(x); }

// Conversions saturate, and NaN gives 0 (for 64 bits of integer: the smallest number).
namespace vgpu {
template <class To, class From>
To saturate(From x, double low, double high, To least, To most, To nan) {
  return x != x ? nan : x <= low ? least : x >= high ? most : static_cast<To>(x);
}
constexpr int kLeast = -2147483647 - 1, kMost = 2147483647;
constexpr long long kMost64 = 9223372036854775807LL, kLeast64 = -kMost64 - 1;
inline int to_int(double x) {
  return saturate<int>(x, -2147483648.0, 2147483647.0, kLeast, kMost, 0);
}
inline unsigned to_uint(double x) { return saturate<unsigned>(x, 0, 4294967295.0, 0, ~0u, 0); }
inline long long to_int64(double x) {
  return saturate<long long>(x, -9223372036854775808.0, 9223372036854775808.0, kLeast64, kMost64,
                             kLeast64);
}
}  // namespace vgpu
inline int __float2int_rn(float x) { return vgpu::to_int(__builtin_rintf(x)); }
inline int __float2int_rz(float x) { return vgpu::to_int(__builtin_truncf(x)); }
inline int __float2int_rd(float x) { return vgpu::to_int(__builtin_floorf(x)); }
inline int __float2int_ru(float x) { return vgpu::to_int(__builtin_ceilf(x)); }
inline unsigned __float2uint_rn(float x) { return vgpu::to_uint(__builtin_rintf(x)); }
inline unsigned __float2uint_rz(float x) { return vgpu::to_uint(__builtin_truncf(x)); }
inline long long __float2ll_rn(float x) { return vgpu::to_int64(__builtin_rintf(x)); }
inline long long __float2ll_rz(float x) { return vgpu::to_int64(__builtin_truncf(x)); }
inline int __double2int_rn(double x) { return vgpu::to_int(__builtin_rint(x)); }
inline int __double2int_rz(double x) { return vgpu::to_int(__builtin_trunc(x)); }
inline long long __double2ll_rn(double x) { return vgpu::to_int64(__builtin_rint(x)); }
inline long long __double2ll_rz(double x) { return vgpu::to_int64(__builtin_trunc(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline float __ll2float_rn(long long x) { return static_cast<float>(x); }
inline double __int2double_rn(int x) { return x; }
inline double __ll2double_rn(long long x) { return static_cast<double>(x); }
inline float __double2float_rn(double x) { return static_cast<float>(x); }

// ---- mathematics ----

#define VGPU_LIBM1(name)           \
  extern "C" float name##f(float); \
  extern "C" double name(double);
#define VGPU_LIBM2(name)                  \
  extern "C" float name##f(float, float); \
  extern "C" double name(double, double);
VGPU_LIBM1(fabs)
VGPU_LIBM1(rint)
VGPU_LIBM1(round)
VGPU_LIBM1(nearbyint)
VGPU_LIBM1(floor)
VGPU_LIBM1(ceil)
VGPU_LIBM1(trunc)
VGPU_LIBM1(exp)
VGPU_LIBM1(log)
VGPU_LIBM1(sqrt)
VGPU_LIBM1(exp2)
VGPU_LIBM1(expm1)
VGPU_LIBM1(log2)
VGPU_LIBM1(log10)
VGPU_LIBM1(log1p)
VGPU_LIBM1(sin)
VGPU_LIBM1(cos)
VGPU_LIBM1(tan)
VGPU_LIBM1(asin)
VGPU_LIBM1(acos)
VGPU_LIBM1(atan)
VGPU_LIBM1(sinh)
VGPU_LIBM1(cosh)
VGPU_LIBM1(tanh)
VGPU_LIBM1(asinh)
VGPU_LIBM1(acosh)
VGPU_LIBM1(atanh)
VGPU_LIBM1(erf)
VGPU_LIBM1(erfc)
VGPU_LIBM1(lgamma)
VGPU_LIBM1(tgamma)
VGPU_LIBM1(cbrt)
VGPU_LIBM2(copysign)
VGPU_LIBM2(fmod)
VGPU_LIBM2(pow)
VGPU_LIBM2(atan2)
VGPU_LIBM2(fmax)
VGPU_LIBM2(fmin)
VGPU_LIBM2(hypot)
VGPU_LIBM2(nextafter)
VGPU_LIBM2(fdim)
#undef VGPU_LIBM1
#undef VGPU_LIBM2
extern "C" float fmaf(float, float, float);
extern "C" double fma(double, double, double);
extern "C" float ldexpf(float, int);
extern "C" double ldexp(double, int);
extern "C" float frexpf(float, int*);
extern "C" double frexp(double, int*);
inline float rsqrtf(float x) { return static_cast<float>(1.0 / __builtin_sqrt(x)); }
inline double rsqrt(double x) { return 1.0 / __builtin_sqrt(x); }
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return powf(10.0f, x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frsqrt_rn(float x) { return rsqrtf(x); }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }
template <class T>
inline bool isnan(T x) {
  return x != x;
}
template <class T>
inline bool isinf(T x) {
  return __builtin_isinf(x);
}
template <class T>
inline bool isfinite(T x) {
  return __builtin_isfinite(x);
}
template <class T>
inline bool signbit(T x) {
  return __builtin_signbit(x);
}
#define VGPU_ORDER(type)                                    \
  inline type min(type a, type b) { return b < a ? b : a; } \
  inline type max(type a, type b) { return a < b ? b : a; }
VGPU_ORDER(int)
VGPU_ORDER(unsigned)
VGPU_ORDER(long)
VGPU_ORDER(unsigned long)
VGPU_ORDER(long long)
VGPU_ORDER(unsigned long long)
#undef VGPU_ORDER
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline int abs(int x) { return x < 0 ? -x : x; }
inline long abs(long x) { return x < 0 ? -x : x; }
inline long long abs(long long x) { return x < 0 ? -x : x; }
inline float abs(float x) { return __builtin_fabsf(x); }
inline double abs(double x) { return __builtin_fabs(x); }

// ---- loads and stores that name a cache ----

#define VGPU_LOAD(name)       \
  template <class T>          \
  inline T name(const T* p) { \
    return *p;                \
  }
VGPU_LOAD(__ldg)
VGPU_LOAD(__ldca)
VGPU_LOAD(__ldcg)
VGPU_LOAD(__ldcs)
VGPU_LOAD(__ldlu)
VGPU_LOAD(__ldcv)
#undef VGPU_LOAD
#define VGPU_STORE(name)               \
  template <class T>                   \
  inline void name(T* p, const T& x) { \
    *p = x;                            \
  }
VGPU_STORE(__stwb)
VGPU_STORE(__stcg)
VGPU_STORE(__stcs)
VGPU_STORE(__stwt)
#undef VGPU_STORE

// ---- narrow floats by their bits: for the twins of instructions that convert ----

namespace vgpu {

/// A float of `kExponent` and `kMantissa` bits, rounded to nearest even. Where `kInfinity` is not
/// set (e4m3) the largest pattern is NaN and there is no infinity. `saturate`: what is too large
/// becomes the largest number, as the conversions to 8 bits do on request.
template <int kExponent, int kMantissa, bool kInfinity>
unsigned narrow(float value, bool saturate) {
  constexpr int kBias = (1 << (kExponent - 1)) - 1;
  constexpr unsigned kAll = (1u << (kExponent + kMantissa)) - 1;
  constexpr unsigned kInf = ((1u << kExponent) - 1) << kMantissa;
  constexpr unsigned kLargest = kInfinity ? kInf - 1 : kAll - 1;
  const unsigned bits = __builtin_bit_cast(unsigned, value);
  const unsigned sign = bits >> 31 << (kExponent + kMantissa), a = bits & 0x7fffffffu;
  if (a > 0x7f800000u) return sign | (kInfinity ? kInf | 1u << (kMantissa - 1) : kAll);
  const int exponent = static_cast<int>(a >> 23) - 127;
  unsigned result;
  if (a == 0x7f800000u) {
    result = kLargest + 1;
  } else {
    const int lost = 23 - kMantissa + (exponent < 1 - kBias ? 1 - kBias - exponent : 0);
    if (a >> 23 == 0 || lost > 24) return sign;  // denormals of f32 are below all of these
    const unsigned long long full = (a & 0x7fffffu) | 0x800000u;
    const unsigned long long half = 1ull << (lost - 1), kept = full >> lost;
    const unsigned long long rest = full & ((1ull << lost) - 1);
    const unsigned rounded =
        static_cast<unsigned>(kept + (rest > half || (rest == half && (kept & 1))));
    result = exponent < 1 - kBias
                 ? rounded
                 : rounded + (static_cast<unsigned>(exponent + kBias - 1) << kMantissa);
    if (exponent + kBias >= 1 << (kExponent + 1)) result = kLargest + 1;
  }
  if (result > kLargest) result = saturate ? kLargest : kInfinity ? kInf : kAll;
  return sign | result;
}
template <int kExponent, int kMantissa, bool kInfinity>
float widen(unsigned bits) {
  constexpr int kBias = (1 << (kExponent - 1)) - 1;
  constexpr unsigned kTop = (1u << kExponent) - 1;
  const unsigned exponent = bits >> kMantissa & kTop, mantissa = bits & ((1u << kMantissa) - 1);
  const unsigned sign = bits >> (kExponent + kMantissa) << 31;
  const bool special =
      kInfinity ? exponent == kTop : exponent == kTop && mantissa == (1u << kMantissa) - 1;
  float value;
  if (special)
    value = mantissa ? __builtin_nanf("") : __builtin_inff();
  else if (exponent == 0)
    value = static_cast<float>(mantissa) *
            __builtin_bit_cast(float, unsigned(128 - kBias - kMantissa) << 23);
  else
    value = __builtin_bit_cast(
        float, (exponent + unsigned(127 - kBias)) << 23 | mantissa << (23 - kMantissa));
  return __builtin_bit_cast(float, __builtin_bit_cast(unsigned, value) | sign);
}
inline unsigned short to_half(float x) {
  return static_cast<unsigned short>(narrow<5, 10, true>(x, false));
}
inline float from_half(unsigned short x) { return widen<5, 10, true>(x); }
inline unsigned short to_bfloat16(float x) {
  const unsigned b = __builtin_bit_cast(unsigned, x);
  return x != x ? 0x7fff : static_cast<unsigned short>((b + 0x7fffu + (b >> 16 & 1)) >> 16);
}
inline float from_bfloat16(unsigned short x) {
  return __builtin_bit_cast(float, unsigned(x) << 16);
}
/// cvt.rn.satfinite: too large becomes the largest number.
inline unsigned char to_e4m3(float x) {
  return static_cast<unsigned char>(narrow<4, 3, false>(x, true));
}
inline float from_e4m3(unsigned char x) { return widen<4, 3, false>(x); }
inline unsigned char to_e5m2(float x) {
  return static_cast<unsigned char>(narrow<5, 2, true>(x, true));
}
inline float from_e5m2(unsigned char x) { return widen<5, 2, true>(x); }

}  // namespace vgpu
