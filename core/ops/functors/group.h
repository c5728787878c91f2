// Groups of floats, for functors that are templates: F is float, or so many floats in vectors as
// wide as the instruction set's registers. A compiler that vectorises a loop makes loads of a table
// in memory; here a lookup is a permutation of registers. Include prelude.h first; CPUs only.
// Invariant: each lane is what the function of the same name makes of a float, bit by bit.
#pragma once

#if !defined(__CUDACC__) && !defined(__CUDACC_RTC__)

namespace tessera::fn {
namespace {  // one binary holds groups of several instruction sets

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
constexpr int kFloats = kVectorBytes / 4;  // of a vector
typedef float Floats __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
typedef int Ints __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
typedef unsigned Words __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));

// The larger or the smaller of two floats; b where either is NaN.
#if defined(__AVX512F__) && !defined(__clang__)
TESSERA_FN Floats fma(Floats a, Floats b, Floats c) {
  return __builtin_ia32_vfmaddps512_mask(a, b, c, static_cast<unsigned short>(-1), 4);
}
TESSERA_FN Floats larger(Floats a, Floats b) {
  return __builtin_ia32_maxps512_mask(a, b, a, static_cast<unsigned short>(-1), 4);
}
TESSERA_FN Floats smaller(Floats a, Floats b) {
  return __builtin_ia32_minps512_mask(a, b, a, static_cast<unsigned short>(-1), 4);
}
TESSERA_FN bool any_negative(Ints x) {
  return __builtin_ia32_cmpd512_mask(x, Ints{}, 1, static_cast<unsigned short>(-1)) != 0;
}
TESSERA_FN Floats lookup(const Table& table, Floats index) {
  return __builtin_shuffle(*reinterpret_cast<const Floats*>(table.of), Ints(index));
}
#elif defined(__AVX2__) && defined(__FMA__) && !defined(__clang__)
TESSERA_FN Floats fma(Floats a, Floats b, Floats c) { return __builtin_ia32_vfmaddps256(a, b, c); }
TESSERA_FN Floats larger(Floats a, Floats b) { return __builtin_ia32_maxps256(a, b); }
TESSERA_FN Floats smaller(Floats a, Floats b) { return __builtin_ia32_minps256(a, b); }
TESSERA_FN bool any_negative(Ints x) { return __builtin_ia32_movmskps256(Floats(x)) != 0; }
TESSERA_FN Floats lookup(const Table& table, Floats index) {
  const Floats* half = reinterpret_cast<const Floats*>(table.of);
  return __builtin_shuffle(half[0], half[1], Ints(index));
}
#else
TESSERA_FN Floats fma(Floats a, Floats b, Floats c) {
  Floats r;
  for (int l = 0; l < kFloats; ++l) r[l] = fn::fma(a[l], b[l], c[l]);
  return r;
}
#if defined(__SSE__) && !defined(__clang__)
TESSERA_FN Floats larger(Floats a, Floats b) { return __builtin_ia32_maxps(a, b); }
TESSERA_FN Floats smaller(Floats a, Floats b) { return __builtin_ia32_minps(a, b); }
TESSERA_FN bool any_negative(Ints x) { return __builtin_ia32_movmskps(Floats(x)) != 0; }
#else
TESSERA_FN Floats larger(Floats a, Floats b) { return a > b ? a : b; }
TESSERA_FN Floats smaller(Floats a, Floats b) { return a < b ? a : b; }
TESSERA_FN bool any_negative(Ints x) {
  bool any = false;
  for (int l = 0; l < kFloats; ++l) any |= x[l] < 0;
  return any;
}
#endif
TESSERA_FN Floats lookup(const Table& table, Floats index) {
  Floats r;
  for (int l = 0; l < kFloats; ++l) r[l] = fn::lookup(table, index[l]);
  return r;
}
#endif

// N floats, a multiple of those in a vector.
template <int N>
struct Group {
  static constexpr int kVectors = N / kFloats;
  static_assert(N % kFloats == 0);
  Floats v[kVectors];

  Group() = default;
  inline __attribute__((always_inline)) explicit Group(float x) {
    // By index: GCC takes a reference to an array of vectors for as aligned as their registers.
    for (int i = 0; i < kVectors; ++i) v[i] = x - Floats{};
  }
};

// The group of f(0), f(1), ..., one vector each.
template <int N, class F>
TESSERA_FN Group<N> vectors(F f) {
  Group<N> r;
  for (int i = 0; i < Group<N>::kVectors; ++i) r.v[i] = f(i);
  return r;
}

template <int N>
TESSERA_FN Group<N> load(const float* p) {
  return vectors<N>([&](int i) { return reinterpret_cast<const Floats*>(p)[i]; });
}
template <int N>
TESSERA_FN void store(float* p, const Group<N>& a) {
  for (int i = 0; i < Group<N>::kVectors; ++i) reinterpret_cast<Floats*>(p)[i] = a.v[i];
}
template <int N>
TESSERA_FN Group<N> operator+(const Group<N>& a, const Group<N>& b) {
  return vectors<N>([&](int i) { return a.v[i] + b.v[i]; });
}
template <int N>
TESSERA_FN Group<N> operator-(const Group<N>& a, const Group<N>& b) {
  return vectors<N>([&](int i) { return a.v[i] - b.v[i]; });
}
template <int N>
TESSERA_FN Group<N> operator*(const Group<N>& a, const Group<N>& b) {
  return vectors<N>([&](int i) { return a.v[i] * b.v[i]; });
}
template <int N>
TESSERA_FN Group<N> operator-(const Group<N>& a, float b) {
  return a - Group<N>(b);
}
template <int N>
TESSERA_FN Group<N> operator*(const Group<N>& a, float b) {
  return a * Group<N>(b);
}
template <int N>
TESSERA_FN Group<N> fma(const Group<N>& a, const Group<N>& b, const Group<N>& c) {
  return vectors<N>([&](int i) { return fma(a.v[i], b.v[i], c.v[i]); });
}
template <int N>
TESSERA_FN Group<N> larger(const Group<N>& a, const Group<N>& b) {
  return vectors<N>([&](int i) { return larger(a.v[i], b.v[i]); });
}
template <int N>
TESSERA_FN Group<N> at_least(const Group<N>& x, float bound) {
  return larger(Group<N>(bound), x);
}
template <int N>
TESSERA_FN Group<N> at_most(const Group<N>& x, float bound) {
  const Group<N> b(bound);
  return vectors<N>([&](int i) { return smaller(b.v[i], x.v[i]); });
}
template <int N>
TESSERA_FN Group<N> operator-(const Group<N>& a) {
  return vectors<N>([&](int i) { return -a.v[i]; });
}
template <int N>
TESSERA_FN Group<N> abs(const Group<N>& x) {
  return vectors<N>([&](int i) { return Floats(Ints(x.v[i]) & 0x7fffffff); });
}
template <int N>
TESSERA_FN Group<N> copysign(const Group<N>& x, const Group<N>& s) {
  return vectors<N>(
      [&](int i) { return Floats((Ints(x.v[i]) & 0x7fffffff) | (Ints(s.v[i]) & ~0x7fffffff)); });
}
template <int N>
TESSERA_FN Group<N> flipped(const Group<N>& x, const Group<N>& s) {
  return vectors<N>([&](int i) { return Floats(Ints(x.v[i]) ^ (Ints(s.v[i]) & ~0x7fffffff)); });
}
template <int N>
TESSERA_FN Group<N> lookup(const Table& table, const Group<N>& index) {
  return vectors<N>([&](int i) { return lookup(table, index.v[i]); });
}
template <int N>
TESSERA_FN Group<N> raised(const Group<N>& x, const Group<N>& by, int places) {
  return vectors<N>([&](int i) { return Floats(Words(x.v[i]) + (Words(by.v[i]) << places)); });
}

// Out of line, and a vector at a time, so that the loops around it keep their registers.
template <float (*kFar)(float)>
__attribute__((noinline)) Floats replaced_beyond(float bound, Floats x, Floats near) {
  float from[kFloats], to[kFloats];
  for (int l = 0; l < kFloats; ++l) from[l] = x[l], to[l] = near[l];
  for (int l = 0; l < kFloats; ++l) to[l] = beyond<kFar>(bound, from[l], to[l]);
  for (int l = 0; l < kFloats; ++l) near[l] = to[l];
  return near;
}
template <float (*kFar)(float), int N>
TESSERA_FN Group<N> beyond(float bound, const Group<N>& x, const Group<N>& near) {
  Words any = {};  // its sign: magnitudes are ordered as their bits, and NaN above all
  for (int i = 0; i < Group<N>::kVectors; ++i)
    any |= (Words(x.v[i]) & 0x7fffffff) + static_cast<unsigned>(0x7fffffff - bits(bound));
  if (__builtin_expect(any_negative(Ints(any)), false))
    return vectors<N>([&](int i) { return replaced_beyond<kFar>(bound, x.v[i], near.v[i]); });
  return near;
}

}  // namespace
}  // namespace tessera::fn

#endif
