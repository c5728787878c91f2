// Small matrix products in registers, for kernels that fuse them with other work. B and C have rows of whole vectors
// (padded by the caller), A any strides. Invariant: each element of C sums over k in order, with fused multiply-adds where
// the instruction set has them, whatever the tile it falls into.
#pragma once
#include <cstdint>
// clang-format off
#include "core/ops/functors/prelude.h"
// clang-format on

namespace tessera::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class T>
struct Vector;
template <>
struct Vector<float> {
  typedef float type __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
};
template <>
struct Vector<double> {
  typedef double type __attribute__((vector_size(kVectorBytes), aligned(8), may_alias));
};
template <class T>
constexpr int kWidth = kVectorBytes / int(sizeof(T));

/// `n` rounded up to whole vectors.
template <class T>
constexpr int64_t padded(int64_t n) {
  return (n + kWidth<T> - 1) / kWidth<T> * kWidth<T>;
}

// One tile of R rows and V vectors.
template <class T, int R, int V, bool kAdd>
inline __attribute__((always_inline)) void tile(const T* a, int64_t a_row, int64_t a_k, const T* b, int64_t b_k, T* c, int64_t c_row, int64_t k) {
  using Vec = typename Vector<T>::type;
  Vec acc[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) acc[r][v] = kAdd ? *reinterpret_cast<const Vec*>(c + r * c_row + v * kWidth<T>) : Vec{};
  for (int64_t i = 0; i < k; ++i, b += b_k, a += a_k) {
    Vec bv[V];
    for (int v = 0; v < V; ++v) bv[v] = *reinterpret_cast<const Vec*>(b + v * kWidth<T>);
    for (int r = 0; r < R; ++r) {
      const T x = a[r * a_row];
      for (int v = 0; v < V; ++v)
        for (int e = 0; e < kWidth<T>; ++e) acc[r][v][e] = fn::fma(x, bv[v][e], acc[r][v][e]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) *reinterpret_cast<Vec*>(c + r * c_row + v * kWidth<T>) = acc[r][v];
}

template <class T, int V, bool kAdd>
void rows_of_tiles(const T* a, int64_t a_row, int64_t a_k, const T* b, int64_t b_k, T* c, int64_t c_row, int64_t m, int64_t k) {
  constexpr int kRows = V >= 4 ? 6 : 8;
  int64_t r = 0;
  for (; r + kRows <= m; r += kRows) tile<T, kRows, V, kAdd>(a + r * a_row, a_row, a_k, b, b_k, c + r * c_row, c_row, k);
  for (; r + 4 <= m; r += 4) tile<T, 4, V, kAdd>(a + r * a_row, a_row, a_k, b, b_k, c + r * c_row, c_row, k);
  for (; r + 2 <= m; r += 2) tile<T, 2, V, kAdd>(a + r * a_row, a_row, a_k, b, b_k, c + r * c_row, c_row, k);
  for (; r < m; ++r) tile<T, 1, V, kAdd>(a + r * a_row, a_row, a_k, b, b_k, c + r * c_row, c_row, k);
}

/// C [m, n] = A [m, k] B [k, n] (+ C). n is a multiple of kWidth; A[i, p] is a[i * a_row + p * a_k].
template <bool kAdd, class T>
void microgemm(const T* a, int64_t a_row, int64_t a_k, const T* b, int64_t b_k, T* c, int64_t c_row, int64_t m, int64_t n, int64_t k) {
  int64_t at = 0;
  for (; at + 4 * kWidth<T> <= n; at += 4 * kWidth<T>) rows_of_tiles<T, 4, kAdd>(a, a_row, a_k, b + at, b_k, c + at, c_row, m, k);
  for (; at + 2 * kWidth<T> <= n; at += 2 * kWidth<T>) rows_of_tiles<T, 2, kAdd>(a, a_row, a_k, b + at, b_k, c + at, c_row, m, k);
  for (; at < n; at += kWidth<T>) rows_of_tiles<T, 1, kAdd>(a, a_row, a_k, b + at, b_k, c + at, c_row, m, k);
}

}  // namespace
}  // namespace tessera::cpu
