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

/// The tile of C that stays in registers: kTileRows rows of kTileVectors vectors. Enough chains of
/// multiply-adds to hide their latency, few enough loads for each to leave the multiplier busy.
#if defined(__AVX512F__)
constexpr int kTileRows = 8, kTileVectors = 2;
#else
constexpr int kTileRows = 6, kTileVectors = 2;
#endif

/// Fetches while a tile multiplies what comes next, so that the misses pass: for every four steps
/// of k one cache line in each of two walks, and in the first of them a row of the tile to be
/// written next. Lines to be written cost most; all at once they would hold up the tile's own
/// operands. Any address will do.
template <class T>
struct Ahead {
  const T* at[2];
  int64_t step[2];
  const T* write;
  int64_t write_row;
  inline __attribute__((always_inline)) void fetch() {
    for (int i = 0; i < 2; ++i) __builtin_prefetch(at[i], 0, 2), at[i] += step[i];
  }
  inline __attribute__((always_inline)) void fetch_to_write() {
    for (int v = 0; v < kTileVectors; ++v) __builtin_prefetch(write + v * kWidth<T>, 1, 3);
    write += write_row;
  }
};
struct NothingAhead {
  inline __attribute__((always_inline)) void fetch() {}
  inline __attribute__((always_inline)) void fetch_to_write() {}
};

/// What products of T are summed in.
template <class T>
using SumOf = std::conditional_t<std::is_same_v<T, Bf16Pair>, float, T>;

// One tile of R rows and V vectors. A[r, i] is a[r * a_row + i * a_k].
template <int R, int V, bool kAdd, class T, class Ahead>
inline __attribute__((always_inline)) void tile(const T* a, int64_t a_row, int64_t a_k, const T* b,
                                                int64_t b_k, SumOf<T>* c, int64_t c_row, int64_t k,
                                                Ahead ahead) {
  using Vec = typename Vector<T>::type;
  using Sum = typename Vector<SumOf<T>>::type;
  Sum acc[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v)
      acc[r][v] = kAdd ? *reinterpret_cast<const Sum*>(c + r * c_row + v * kWidth<T>) : Sum{};
  // An address may be a pointer and once or twice a stride: a pointer serves three rows.
  const T* row[(R + 2) / 3];
  for (int q = 0; q < (R + 2) / 3; ++q) row[q] = a + 3 * q * a_row;
  auto step = [&]() __attribute__((always_inline)) {
    Vec bv[V];
    for (int v = 0; v < V; ++v) bv[v] = *reinterpret_cast<const Vec*>(b + v * kWidth<T>);
    for (int r = 0; r < R; ++r) {
      const Vec x = spread(row[r / 3][r % 3 * a_row]);
      for (int v = 0; v < V; ++v) acc[r][v] = multiply_add(x, bv[v], acc[r][v]);
    }
    for (auto& p : row) p += a_k;
    b += b_k;
  };
  int64_t i = 0;
  for (; i + 4 <= k && i < 4 * R; i += 4) {
    ahead.fetch();
    ahead.fetch_to_write();
    step(), step(), step(), step();
  }
  for (; i + 4 <= k; i += 4) {
    ahead.fetch();
    step(), step(), step(), step();
  }
  for (; i < k; ++i) step();
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) *reinterpret_cast<Sum*>(c + r * c_row + v * kWidth<T>) = acc[r][v];
}

// Rows [0, m) of one column of tiles.
template <int V, bool kAdd, class T, class Ahead>
inline __attribute__((always_inline)) void rows_of_tiles(const T* a, int64_t a_row, int64_t a_k,
                                                         const T* b, int64_t b_k, SumOf<T>* c,
                                                         int64_t c_row, int64_t m, int64_t k,
                                                         Ahead ahead) {
  int64_t r = 0;
  auto rows = [&]<int R>() __attribute__((always_inline)) {
    for (; r + R <= m; r += R)
      tile<R, V, kAdd>(a + r * a_row, a_row, a_k, b, b_k, c + r * c_row, c_row, k, ahead);
  };
  rows.template operator()<kTileRows>();
  rows.template operator()<4>();
  rows.template operator()<2>();
  rows.template operator()<1>();
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

/// to[c, r] = from[r, c]. The next rows are fetched while some are moved.
template <class T>
void transpose(const T* from, int64_t from_row, int64_t rows, int64_t columns, T* to,
               int64_t to_row) {
  int64_t r = 0;
#ifndef __clang__
  constexpr int64_t kW = kWidth<T>;
  for (; r + kW <= rows; r += kW) {
    int64_t c = 0;
    for (; c + kW <= columns; c += kW) {
      for (int64_t i = 0; i < kW; ++i) __builtin_prefetch(from + (r + kW + i) * from_row + c, 0, 2);
      transpose_block(from + r * from_row + c, from_row, to + c * to_row + r, to_row);
    }
    for (; c < columns; ++c)
      for (int64_t i = r; i < r + kW; ++i) to[c * to_row + i] = from[i * from_row + c];
  }
#endif
  for (; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) to[c * to_row + r] = from[r * from_row + c];
}

/// C [m, n] = A [m, k] B [k, n] (+ C). n is a multiple of kWidth; A[i, p] is a[i * a_row + p *
/// a_k]. In pairs of bf16, k counts pairs, and B[p, j] holds rows 2 p and 2 p + 1 of column j.
template <bool kAdd, class T>
void microgemm(const T* a, int64_t a_row, int64_t a_k, const T* b, int64_t b_k, SumOf<T>* c,
               int64_t c_row, int64_t m, int64_t n, int64_t k) {
  constexpr int64_t kColumns = kTileVectors * kWidth<T>;
  const NothingAhead nothing;
  int64_t at = 0;
  for (; at + kColumns <= n; at += kColumns)
    rows_of_tiles<kTileVectors, kAdd>(a, a_row, a_k, b + at, b_k, c + at, c_row, m, k, nothing);
  for (; at < n; at += kWidth<T>)
    rows_of_tiles<1, kAdd>(a, a_row, a_k, b + at, b_k, c + at, c_row, m, k, nothing);
}

}  // namespace
}  // namespace tessera::cpu
