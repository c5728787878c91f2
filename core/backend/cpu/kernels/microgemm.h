// Small matrix products in registers, for kernels that fuse them with other work. B and C have rows
// of whole vectors (padded by the caller), A any strides. Invariant: each element of C sums over k
// in order, with fused multiply-adds where the instruction set has them, whatever the tile it falls
// into.
#pragma once
#include <cstdint>
#include <type_traits>

#include "core/backend/cpu/kernels/vector.h"

namespace tessera::cpu {
namespace {

/// `n` rounded up to whole cache lines, which are whole vectors of every instruction set.
template <class T>
constexpr int64_t padded(int64_t n) {
  constexpr int64_t kLine = 64 / sizeof(T);
  return (n + kLine - 1) / kLine * kLine;
}

// One tile of R rows and V vectors.
template <class T, int R, int V, bool kAdd>
inline __attribute__((always_inline)) void tile(const T* a, int64_t a_row, int64_t a_k, const T* b,
                                                int64_t b_k, T* c, int64_t c_row, int64_t k) {
  using Vec = typename Vector<T>::type;
  Vec acc[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v)
      acc[r][v] = kAdd ? *reinterpret_cast<const Vec*>(c + r * c_row + v * kWidth<T>) : Vec{};
  for (int64_t i = 0; i < k; ++i, b += b_k, a += a_k) {
    Vec bv[V];
    for (int v = 0; v < V; ++v) bv[v] = *reinterpret_cast<const Vec*>(b + v * kWidth<T>);
    for (int r = 0; r < R; ++r) {
      const Vec x = a[r * a_row] - Vec{};  // in every lane
      for (int v = 0; v < V; ++v) acc[r][v] = multiply_add(x, bv[v], acc[r][v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) *reinterpret_cast<Vec*>(c + r * c_row + v * kWidth<T>) = acc[r][v];
}

template <class T, int V, bool kAdd>
void rows_of_tiles(const T* a, int64_t a_row, int64_t a_k, const T* b, int64_t b_k, T* c,
                   int64_t c_row, int64_t m, int64_t k) {
  constexpr int kRows = V >= 4 ? 6 : 8;
  int64_t r = 0;
  for (; r + kRows <= m; r += kRows)
    tile<T, kRows, V, kAdd>(a + r * a_row, a_row, a_k, b, b_k, c + r * c_row, c_row, k);
  for (; r + 4 <= m; r += 4)
    tile<T, 4, V, kAdd>(a + r * a_row, a_row, a_k, b, b_k, c + r * c_row, c_row, k);
  for (; r + 2 <= m; r += 2)
    tile<T, 2, V, kAdd>(a + r * a_row, a_row, a_k, b, b_k, c + r * c_row, c_row, k);
  for (; r < m; ++r)
    tile<T, 1, V, kAdd>(a + r * a_row, a_row, a_k, b, b_k, c + r * c_row, c_row, k);
}

#ifndef __clang__
// kWidth rows become kWidth columns: log2(kWidth) perfect shuffles of the rows.
template <class T>
inline __attribute__((always_inline)) void transpose_block(const T* from, int64_t from_row, T* to,
                                                           int64_t to_row) {
  using Vec = typename Vector<T>::type;
  constexpr int kW = kWidth<T>;
  typedef std::conditional_t<sizeof(T) == 4, int32_t, int64_t> Index
      __attribute__((vector_size(kVectorBytes)));
  Index low, high;
  for (int i = 0; i < kW; ++i) low[i] = i / 2 + (i % 2) * kW, high[i] = low[i] + kW / 2;
  Vec r[kW], s[kW];
  for (int i = 0; i < kW; ++i) r[i] = *reinterpret_cast<const Vec*>(from + i * from_row);
  for (int stage = kW; stage > 1; stage /= 2) {
    for (int i = 0; i < kW / 2; ++i) {
      s[2 * i] = __builtin_shuffle(r[i], r[i + kW / 2], low);
      s[2 * i + 1] = __builtin_shuffle(r[i], r[i + kW / 2], high);
    }
    for (int i = 0; i < kW; ++i) r[i] = s[i];
  }
  for (int i = 0; i < kW; ++i) *reinterpret_cast<Vec*>(to + i * to_row) = r[i];
}
#endif

/// to[c, r] = from[r, c].
template <class T>
void transpose(const T* from, int64_t from_row, int64_t rows, int64_t columns, T* to,
               int64_t to_row) {
  int64_t r = 0;
#ifndef __clang__
  constexpr int64_t kW = kWidth<T>;
  for (; r + kW <= rows; r += kW) {
    int64_t c = 0;
    for (; c + kW <= columns; c += kW)
      transpose_block(from + r * from_row + c, from_row, to + c * to_row + r, to_row);
    for (; c < columns; ++c)
      for (int64_t i = r; i < r + kW; ++i) to[c * to_row + i] = from[i * from_row + c];
  }
#endif
  for (; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) to[c * to_row + r] = from[r * from_row + c];
}

/// C [m, n] = A [m, k] B [k, n] (+ C). n is a multiple of kWidth; A[i, p] is a[i * a_row + p *
/// a_k].
template <bool kAdd, class T>
void microgemm(const T* a, int64_t a_row, int64_t a_k, const T* b, int64_t b_k, T* c, int64_t c_row,
               int64_t m, int64_t n, int64_t k) {
  int64_t at = 0;
  for (; at + 4 * kWidth<T> <= n; at += 4 * kWidth<T>)
    rows_of_tiles<T, 4, kAdd>(a, a_row, a_k, b + at, b_k, c + at, c_row, m, k);
  for (; at + 2 * kWidth<T> <= n; at += 2 * kWidth<T>)
    rows_of_tiles<T, 2, kAdd>(a, a_row, a_k, b + at, b_k, c + at, c_row, m, k);
  for (; at < n; at += kWidth<T>)
    rows_of_tiles<T, 1, kAdd>(a, a_row, a_k, b + at, b_k, c + at, c_row, m, k);
}

}  // namespace
}  // namespace tessera::cpu
