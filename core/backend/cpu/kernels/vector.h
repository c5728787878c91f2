// Vectors as wide as the instruction set's registers, and groups of them for functors. Invariant: a
// group holds kGroup floats whatever the width, so sums kept in its lanes have one order on every
// instruction set. Loops that reduce use them, because the compiler's own vectoriser would keep
// their sums in memory, not in registers.
#pragma once
#include <cstdint>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

// The second needs the first.
// clang-format off
#include "core/ops/functors/prelude.h"
#include "core/ops/functors/group.h"
// clang-format on

namespace tessera::cpu {
namespace {

using fn::kVectorBytes;

template <class T>
struct Vector;
template <>
struct Vector<float> {
  using type = fn::Floats;
};
template <>
struct Vector<double> {
  typedef double type __attribute__((vector_size(kVectorBytes), aligned(8), may_alias));
};
using Floats = Vector<float>::type;
using Doubles = Vector<double>::type;

/// Two bf16 as they lie in memory, which dot instructions multiply together.
struct Bf16Pair {
  uint16_t first, second;
};
template <>
struct Vector<Bf16Pair> {
  typedef int32_t type __attribute__((vector_size(kVectorBytes), aligned(2), may_alias));
};
using Pairs = Vector<Bf16Pair>::type;

// a b + c, rounded once where the instruction set can.
#if defined(__AVX512F__)
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Doubles multiply_add(Doubles a, Doubles b, Doubles c) { return _mm512_fmadd_pd(a, b, c); }
#elif defined(__FMA__)
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Doubles multiply_add(Doubles a, Doubles b, Doubles c) { return _mm256_fmadd_pd(a, b, c); }
#else
inline Floats multiply_add(Floats a, Floats b, Floats c) { return a * b + c; }
inline Doubles multiply_add(Doubles a, Doubles b, Doubles c) { return a * b + c; }
#endif

// In every lane.
inline Floats spread(float x) { return x - Floats{}; }
inline Doubles spread(double x) { return x - Doubles{}; }

#if defined(__AVX512F__)
// AVX512-BF16, which these files are not compiled for: only where has_bf16_dot() may it run.
// Denormals count as zeros.
inline Pairs spread(Bf16Pair x) {
  int32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits - Pairs{};
}
// c + a.second b.second + a.first b.first
inline Floats multiply_add(Pairs a, Pairs b, Floats c) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b));
  return c;
}
// Rounded to nearest even; NaN stays.
inline __m256i narrow(Floats x) {
  __m256i low;
  asm("vcvtneps2bf16 %1, %0" : "=v"(low) : "v"(x));
  return low;
}
inline void store_narrow(uint16_t* to, Floats x) {
  const __m256i low = narrow(x);
  __builtin_memcpy(to, &low, sizeof(low));
}
// Lane i holds first[i] and second[i]. Masked by ones: the plain form warns in GCC 12.
inline Pairs interleave(__m256i first, __m256i second) {
  return Pairs(_mm512_maskz_cvtepu16_epi32(0xffff, first)) |
         Pairs(_mm512_maskz_cvtepu16_epi32(0xffff, second)) << 16;
}
// The lower and the upper half of a vector to two places. Masked as above.
template <class T, class Vec>
inline void store_halves(T* low, T* high, Vec x) {
  const __m256i halves[] = {_mm512_maskz_extracti64x4_epi64(0xf, __m512i(x), 0),
                            _mm512_maskz_extracti64x4_epi64(0xf, __m512i(x), 1)};
  __builtin_memcpy(low, &halves[0], sizeof(__m256i));
  __builtin_memcpy(high, &halves[1], sizeof(__m256i));
}
inline Pairs interleave(const uint16_t* first, const uint16_t* second) {
  __m256i low, high;
  __builtin_memcpy(&low, first, sizeof(low)), __builtin_memcpy(&high, second, sizeof(high));
  return interleave(low, high);
}
#endif

using fn::larger;

// A store that bypasses the caches to p, aligned to kVectorBytes. streams_done() orders such stores
// before what follows.
#if defined(__AVX512F__)
inline void stream(float* p, Floats a) { _mm512_stream_ps(p, a); }
#elif defined(__AVX2__)
inline void stream(float* p, Floats a) { _mm256_stream_ps(p, a); }
#elif defined(__x86_64__)
inline void stream(float* p, Floats a) { _mm_stream_ps(p, a); }
#else
inline void stream(float* p, Floats a) { *reinterpret_cast<Floats*>(p) = a; }
#endif
inline void streams_done() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

template <class T>
constexpr int kWidth = kVectorBytes / int(sizeof(T));

// ---- groups of floats, for functors that are templates ----

constexpr int kGroup = 32;  // two of the widest vectors: enough chains to hide latencies

using Group = fn::Group<kGroup>;

TESSERA_FN Group load_group(const float* p) { return fn::load<kGroup>(p); }
TESSERA_FN void stream(float* p, const Group& a) {
  for (int i = 0; i < Group::kVectors; ++i) stream(p + i * kWidth<float>, a.v[i]);
}

// Lane i meets lane i + N / 2, and so on, as fold() of lanes.h has it, but in registers.
template <int N, class F>
TESSERA_FN float fold_vector(Floats a, F join) {
  if constexpr (N == 1) {
    return a[0];
  } else {
#ifndef __clang__
    typedef int32_t Ints __attribute__((vector_size(kVectorBytes)));
    Ints from;
    for (int i = 0; i < kWidth<float>; ++i) from[i] = (i + N / 2) % kWidth<float>;
    const Floats b = __builtin_shuffle(a, from);
#else
    Floats b = a;
    for (int i = 0; i < N / 2; ++i) b[i] = a[i + N / 2];
#endif
    return fold_vector<N / 2>(join(a, b), join);
  }
}
template <class F>
TESSERA_FN float fold(Group g, F join) {
  for (int n = Group::kVectors / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) g.v[i] = join(g.v[i], g.v[i + n]);
  return fold_vector<kWidth<float>>(g.v[0], join);
}
TESSERA_FN float sum_of(const Group& g) {
  return fold(g, [](Floats a, Floats b) { return a + b; });
}
// No value may be NaN.
TESSERA_FN float highest_of(const Group& g) {
  return fold(g, [](Floats a, Floats b) { return larger(a, b); });
}

}  // namespace
}  // namespace tessera::cpu
