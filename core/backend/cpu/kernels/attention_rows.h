// How the kernels of attention cut a head, which keys a query sees, and what they fetch while they
// compute.
#pragma once
#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/kernels/tables.h"
#include "core/backend/cpu/kernels/vector.h"

namespace tessera::cpu {
namespace {

// n rounded up to whole groups.
inline int64_t groups(int64_t n) { return (n + kGroup - 1) / kGroup * kGroup; }

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Keys that row `i` attends to, of those from `first` on.
inline int64_t visible(const AttentionHead& h, int64_t i, int64_t first, int64_t count) {
  if (!h.causal) return count;
  int64_t n = i + 1 - first;
  return n < 0 ? 0 : least(n, count);
}

// x = x scale + the mask of row `i`, over `count` keys from `first` on.
template <class T, class In>
void apply_mask(const AttentionHead& h, const In& in, int64_t i, int64_t first, int64_t count,
                T scale, T* x) {
  const int64_t at = i * h.mask_row + first * h.mask_column, step = h.mask_column;
  const auto apply = [&](const auto* mask, auto one) {
    if (step == 1)
      for (int64_t c = 0; c < count; ++c) x[c] = one(x[c] * scale, mask[c]);
    else
      for (int64_t c = 0; c < count; ++c) x[c] = one(x[c] * scale, mask[c * step]);
  };
  const T low = T(-__builtin_inf());
  if (in.sees)
    apply(in.sees + at, [=](T score, bool sees) { return sees ? score : low; });
  else
    apply(in.adds + at, [=](T score, T more) { return more < T(kLeastMask) ? low : score + more; });
}

// Random words of `count` weights of row `i` from key `first` on, in a buffer of at least count +
// 6, which the kernel reads in whole groups; null where there is no dropout.
template <class In, int64_t kWords>
const uint32_t* draw(const AttentionHead& h, const In& in, int64_t i, int64_t first, int64_t count,
                     uint32_t (&buffer)[kWords]) {
  if (!h.drops) return nullptr;
  const uint64_t at = in.draw_first + uint64_t(i * h.draw_row + first);
  const int64_t skip = int64_t(at % 4);
  isa_table<RandomTable, isa::TESSERA_ISA>().words(h.draw_key, in.draw_hi, at / 4,
                                                   (skip + count + 3) / 4, buffer);
  return buffer + skip;
}

// x where its word is not below the threshold, else 0.
inline Group keep(Group x, const uint32_t* words, uint32_t threshold) {
  for (int i = 0; i < Group::kVectors; ++i) {
    const fn::Words w = *reinterpret_cast<const fn::Words*>(words + i * kWidth<float>);
    x.v[i] = w < threshold ? Floats{} : x.v[i];
  }
  return x;
}
template <class T>
T keep_one(T x, uint32_t word, uint32_t threshold) {
  return word < threshold ? T(0) : x;
}

// Whether no query attends to `count` keys from `first` on, where all queries have one mask.
template <class In>
bool hidden(const AttentionHead& h, const In& in, int64_t first, int64_t count) {
  if (!in.sees || h.mask_row != 0) return false;
  for (int64_t c = first; c < first + count; ++c)
    if (in.sees[c * h.mask_column]) return false;
  return true;
}

template <class T>
bool any_nan(const T* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    if (x[i] != x[i]) return true;
  return false;
}

// Fetches a row of `width` elements into the second cache.
template <class T>
void fetch(const T* row, int64_t width) {
  for (int64_t x = 0; x < width; x += 64 / int64_t(sizeof(T))) __builtin_prefetch(row + x, 0, 2);
}

// Fetches a row that will be written.
template <class T>
void fetch_to_write(const T* row, int64_t width) {
  for (int64_t x = 0; x < width; x += 64 / int64_t(sizeof(T))) __builtin_prefetch(row + x, 1, 3);
}

// Row i of what a head reads.
template <class In>
void fetch_row(const AttentionHead& h, const In& in, int64_t i) {
  fetch(in.q + i * h.q_row, h.d);
  if (i >= h.s) return;
  fetch(in.k + i * h.k_row, h.d);
  fetch(in.v + i * h.v_row, h.e);
}

// Fetches what the pass backward reads and writes of row i besides.
template <class In, class T>
void fetch_row_backward(const AttentionHead& h, const In& next, int64_t i, const T* dq, const T* dk,
                        const T* dv) {
  fetch_row(h, next, i);
  fetch(next.g + i * h.g_row, h.e);
  fetch(next.out + i * h.out_row, h.e);
  fetch_to_write(dq + i * h.dq_row, h.d);
  if (i >= h.s) return;
  fetch_to_write(dk + i * h.dk_row, h.d);
  fetch_to_write(dv + i * h.dv_row, h.e);
}

}  // namespace
}  // namespace tessera::cpu
