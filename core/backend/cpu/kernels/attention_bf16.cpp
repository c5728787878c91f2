// Tiled attention of one head in bf16, as attention.cpp has it for f32: products of pairs by dot
// instructions, summed in f32; scores, their exponentials and all sums are f32, and what enters the
// next product is rounded to bf16. Pairs run along the letter that a product sums over, so K, V, Q
// and dO are packed with two of their rows side by side, or transposed.
#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/kernels/attention_rows.h"
#include "core/backend/cpu/kernels/microgemm.h"
#include "core/backend/cpu/kernels/tables.h"
#include "core/base/boundaries.h"
// clang-format off
#include "core/ops/functors/prelude.h"
#include "core/ops/functors/math.h"
// clang-format on

namespace tessera::cpu {
namespace {

#if defined(__AVX512F__)

// Queries and keys of a tile.
constexpr int64_t kRows = limit("attention_bf16.rows"), kColumns = limit("attention_bf16.columns"),
                  kRowsBackward = limit("attention_bf16.rows_backward"),
                  kColumnsBackward = limit("attention_bf16.columns_backward");

int64_t pairs(int64_t n) { return (n + 1) / 2; }
const Bf16Pair* in_pairs(const uint16_t* p) { return reinterpret_cast<const Bf16Pair*>(p); }

// to[p, i] = (from[2 p, i], from[2 p + 1, i]); zeros beyond the last row and up to the padded
// width.
void pack_rows(const uint16_t* from, int64_t row, int64_t rows, int64_t width, Bf16Pair* to,
               int64_t to_row) {
  for (int64_t r = 0; r < rows; r += 2, from += 2 * row, to += to_row) {
    const bool both = r + 1 < rows;
    int64_t x = 0;
    for (; both && x + kWidth<float> <= width; x += kWidth<float>)
      *reinterpret_cast<Pairs*>(to + x) = interleave(from + x, from + row + x);
    for (; x < width; ++x) to[x] = {from[x], both ? from[row + x] : uint16_t(0)};
    for (; x < to_row; ++x) to[x] = {0, 0};
  }
}

// to[p, i] = (from[i, 2 p], from[i, 2 p + 1]), zeros up to the padded width. `width` is even.
void pack_transposed(const uint16_t* from, int64_t row, int64_t rows, int64_t width, Bf16Pair* to,
                     int64_t to_row) {
  for (int64_t p = 0; p < width / 2; ++p)
    for (int64_t i = rows; i < to_row; ++i) to[p * to_row + i] = {0, 0};
  transpose(in_pairs(from), row / 2, rows, width / 2, to, to_row);
}

void store_narrow(uint16_t* to, const Group& x) {
  for (int i = 0; i < Group::kVectors; ++i) store_narrow(to + i * kWidth<float>, x.v[i]);
}

// to[i] = from[i] * scale, rounded. `from` is padded.
void round_row(const float* from, int64_t width, uint16_t* to, float scale) {
  int64_t x = 0;
  for (; x + kWidth<float> <= width; x += kWidth<float>)
    store_narrow(to + x, *reinterpret_cast<const Floats*>(from + x) * spread(scale));
  if (x == width) return;
  uint16_t rest[kWidth<float>];
  store_narrow(rest, *reinterpret_cast<const Floats*>(from + x) * spread(scale));
  __builtin_memcpy(to + x, rest, size_t(width - x) * sizeof(uint16_t));
}

// x *= scale over n, a number of groups; returns the highest.
float scaled_max(float* x, int64_t n, float scale) {
  Group high(-fn::inf());
  for (int64_t c = 0; c < n; c += kGroup) {
    const Group y = load_group(x + c) * Group(scale);
    store(x + c, y), high = larger(y, high);
  }
  return highest_of(high);
}

// p = exp(x - top), rounded, or zeros where words, which may be null, drop them; returns the sum of
// all before rounding.
float exp_sum(const float* x, int64_t n, float top, uint16_t* p, const uint32_t* words,
              uint32_t threshold) {
  Group sum(0.0f);
  for (int64_t c = 0; c < n; c += kGroup) {
    const Group e = fn::exp_by_table(load_group(x + c) - Group(top));
    store_narrow(p + c, words ? keep(e, words + c, threshold) : e), sum = sum + e;
  }
  return sum_of(sum);
}

// As in attention.cpp, of scale x.
void probabilities(float* x, float* y, int64_t n, float scale, float shift, float delta,
                   const uint32_t* words, uint32_t threshold, float kept) {
  for (int64_t c = 0; c < n; c += kGroup) {
    const Group e = fn::exp_by_table(load_group(x + c) * Group(scale) - Group(shift)),
                d = load_group(y + c);
    if (words) {
      store(x + c, keep(e, words + c, threshold));
      store(y + c, e * (keep(d * Group(kept), words + c, threshold) - Group(delta)));
    } else {
      store(x + c, e), store(y + c, e * (d - Group(delta)));
    }
  }
}

// The sum of products, by pairs.
float dot(const uint16_t* a, const uint16_t* b, int64_t n) {
  constexpr int64_t kStep = 2 * kWidth<float>;
  Floats sum{};
  for (; n >= kStep; n -= kStep, a += kStep, b += kStep)
    sum = multiply_add(*reinterpret_cast<const Pairs*>(a), *reinterpret_cast<const Pairs*>(b), sum);
  if (n > 0) {
    uint16_t last[2][kStep] = {};
    __builtin_memcpy(last[0], a, size_t(n) * sizeof(*a));
    __builtin_memcpy(last[1], b, size_t(n) * sizeof(*b));
    sum = multiply_add(*reinterpret_cast<const Pairs*>(last[0]),
                       *reinterpret_cast<const Pairs*>(last[1]), sum);
  }
  return fold_vector<kWidth<float>>(sum, [](Floats x, Floats y) { return x + y; });
}

// to[r] = the bits of x[r] in bf16; where to_pairs is not null, to_pairs = (x[0, c], x[1, c]).
void round_two_rows(const float* x, int64_t row, int64_t n, Bf16Pair* to_pairs, uint16_t* to) {
  for (int64_t c = 0; c < n; c += kWidth<float>) {
    const __m256i first = narrow(*reinterpret_cast<const Floats*>(x + c)),
                  second = narrow(*reinterpret_cast<const Floats*>(x + row + c));
    *reinterpret_cast<Pairs*>(to_pairs + c) = interleave(first, second);
    if (!to) continue;
    __builtin_memcpy(to + c, &first, sizeof(first));
    __builtin_memcpy(to + row + c, &second, sizeof(second));
  }
}

// Cuts scratch into arrays.
struct Scratch {
  float* at;
  float* floats(int64_t n) { return at += n, at - n; }
  Bf16Pair* pairs(int64_t n) { return reinterpret_cast<Bf16Pair*>(floats(n)); }
  uint16_t* halves(int64_t n) { return reinterpret_cast<uint16_t*>(floats(n / 2)); }
};

// Keys that some query attends to.
int64_t seen(const AttentionHead& h) { return h.causal ? least(h.s, h.t) : h.s; }

void forward(const AttentionHead& h, const AttentionBf16In& in, const AttentionBf16In& next,
             uint16_t* out, float* lse, float* work) {
  const int64_t ep = padded<float>(h.e), sp = padded<float>(h.s);
  const float scale = float(h.scale), rest = in.masked() ? 1 : scale;  // a mask comes after scaling
  Scratch scratch{work};
  Bf16Pair *kt = scratch.pairs(h.d / 2 * sp), *vp = scratch.pairs(pairs(h.s) * ep);
  float *score = scratch.floats(kRows * kColumns), *acc = scratch.floats(kRows * ep);
  uint16_t* p = scratch.halves(kRows * kColumns);
  pack_transposed(in.k, h.k_row, h.s, h.d, kt, sp);
  // An odd last tile multiplies the pair's other row by 0, which must not be a key that no query
  // sees.
  pack_rows(in.v, h.v_row, seen(h), h.e, vp, ep);
  uint32_t words[kColumns + kGroup] = {};
  for (int64_t i0 = 0; i0 < h.t; i0 += kRows) {
    const int64_t rows = least(kRows, h.t - i0);
    float top[kRows], sum[kRows];
    for (int64_t i = 0; i < rows; ++i) top[i] = -fn::inf(), sum[i] = 0;
    for (int64_t i = 0; i < rows * ep; ++i) acc[i] = 0;
    const int64_t keys = h.causal ? least(h.s, i0 + rows) : h.s;
    for (int64_t j0 = 0; j0 < keys; j0 += kColumns) {
      const int64_t columns = least(kColumns, keys - j0), wide = groups(columns);
      if (hidden(h, in, j0, columns)) continue;
      microgemm<false>(in_pairs(in.q + i0 * h.q_row), h.q_row / 2, 1, kt + j0, sp, score, kColumns,
                       rows, padded<float>(columns), h.d / 2);
      for (int64_t i = 0; i < rows; ++i) {
        if (j0 == 0) {
          fetch_row(h, next, i0 + i);
          fetch_to_write(out + (i0 + i) * h.out_row, h.e);
        }
        float* x = score + i * kColumns;
        const int64_t n = visible(h, i0 + i, j0, columns);
        if (n == 0) {  // exp(-inf - -inf) must not be formed
          for (int64_t c = 0; c < wide; ++c) p[i * kColumns + c] = 0;
          continue;
        }
        if (in.masked()) apply_mask(h, in, i0 + i, j0, n, scale, x);
        float high = scaled_max(x, n / kGroup * kGroup, rest);
        for (int64_t c = n / kGroup * kGroup; c < n; ++c)
          x[c] *= rest, high = x[c] > high ? x[c] : high;
        for (int64_t c = n; c < wide; ++c) x[c] = -fn::inf();
        high = high > top[i] ? high : top[i];
        if (high == -fn::inf() && !any_nan(x, n)) {
          for (int64_t c = 0; c < wide; ++c) p[i * kColumns + c] = 0;
          continue;
        }
        const float keep = top[i] == high ? 1 : j0 == 0 ? 0 : fn::exp(top[i] - high);
        sum[i] = sum[i] * keep + exp_sum(x, wide, high, p + i * kColumns,
                                         draw(h, in, i0 + i, j0, n, words), h.threshold);
        top[i] = high;
        if (keep != 1 && j0 > 0)
          for (int64_t e = 0; e < ep; ++e) acc[i * ep + e] *= keep;
      }
      microgemm<true>(in_pairs(p), kColumns / 2, 1, vp + j0 / 2 * ep, ep, acc, ep, rows, ep,
                      pairs(columns));
    }
    for (int64_t i = 0; i < rows; ++i) {
      const bool none = in.masked() && sum[i] == 0;
      round_row(acc + i * ep, h.e, out + (i0 + i) * h.out_row, none ? 0 : float(h.kept) / sum[i]);
      lse[i0 + i] = none ? fn::inf() : top[i] + fn::log(sum[i]);
    }
  }
}

// The formulas are in attention.cpp.
void backward(const AttentionHead& h, const AttentionBf16In& in, const AttentionBf16In& next,
              uint16_t* dq, uint16_t* dk, uint16_t* dv, float* work) {
  constexpr int64_t kRows = kRowsBackward, kColumns = kColumnsBackward;
  const int64_t dp = padded<float>(h.d), ep = padded<float>(h.e), sp = padded<float>(h.s);
  const float scale = float(h.scale), rest = in.masked() ? 1 : scale;
  Scratch scratch{work};
  Bf16Pair *kt = scratch.pairs(h.d / 2 * sp), *vt = scratch.pairs(h.e / 2 * sp),
           *kp = scratch.pairs(pairs(h.s) * dp);
  float *dk_sum = scratch.floats(h.s * dp), *dv_sum = scratch.floats(h.s * ep);
  Bf16Pair *qp = scratch.pairs(kRows / 2 * dp), *gp = scratch.pairs(kRows / 2 * ep),
           *p_pairs = scratch.pairs(kRows / 2 * kColumns),
           *ds_pairs = scratch.pairs(kRows / 2 * kColumns);
  uint16_t* ds_rows = scratch.halves(kRows * kColumns);
  float *dq_sum = scratch.floats(kRows * dp), *p = scratch.floats(kRows * kColumns),
        *ds = scratch.floats(kRows * kColumns);
  pack_transposed(in.k, h.k_row, h.s, h.d, kt, sp);
  pack_transposed(in.v, h.v_row, h.s, h.e, vt, sp);
  pack_rows(in.k, h.k_row, seen(h), h.d, kp, dp);
  for (int64_t i = 0; i < h.s * (dp + ep); ++i) dk_sum[i] = 0;
  uint32_t words[kColumns + kGroup] = {};
  for (int64_t i0 = 0; i0 < h.t; i0 += kRows) {
    const int64_t rows = least(kRows, h.t - i0);
    const uint16_t *q = in.q + i0 * h.q_row, *g = in.g + i0 * h.g_row;
    pack_rows(q, h.q_row, rows, h.d, qp, dp);
    pack_rows(g, h.g_row, rows, h.e, gp, ep);
    float delta[kRows];
    for (int64_t i = 0; i < rows; ++i)
      delta[i] = dot(g + i * h.g_row, in.out + (i0 + i) * h.out_row, h.e);
    for (int64_t i = 0; i < rows * dp; ++i) dq_sum[i] = 0;
    const int64_t keys = h.causal ? least(h.s, i0 + rows) : h.s;
    for (int64_t j0 = 0; j0 < keys; j0 += kColumns) {
      const int64_t columns = least(kColumns, keys - j0), wide = padded<float>(columns);
      if (hidden(h, in, j0, columns)) continue;
      microgemm<false>(in_pairs(q), h.q_row / 2, 1, kt + j0, sp, p, kColumns, rows, wide, h.d / 2);
      microgemm<false>(in_pairs(g), h.g_row / 2, 1, vt + j0, sp, ds, kColumns, rows, wide, h.e / 2);
      for (int64_t i = 0; i < rows; ++i) {
        if (j0 == 0) fetch_row_backward(h, next, i0 + i, dq, dk, dv);
        float *x = p + i * kColumns, *y = ds + i * kColumns;
        const int64_t n = visible(h, i0 + i, j0, columns);
        if (in.masked()) apply_mask(h, in, i0 + i, j0, n, scale, x);
        probabilities(x, y, groups(n), rest, in.lse[i0 + i], delta[i],
                      draw(h, in, i0 + i, j0, n, words), h.threshold, float(h.kept));
        for (int64_t c = n; c < wide; ++c) x[c] = y[c] = 0;
      }
      if (rows % 2)
        for (int64_t c = 0; c < wide; ++c) p[rows * kColumns + c] = ds[rows * kColumns + c] = 0;
      for (int64_t i = 0; i < rows; i += 2) {
        const int64_t at = i * kColumns;
        round_two_rows(p + at, kColumns, wide, p_pairs + at / 2, nullptr);
        round_two_rows(ds + at, kColumns, wide, ds_pairs + at / 2, ds_rows + at);
      }
      microgemm<true>(p_pairs, 1, kColumns, gp, ep, dv_sum + j0 * ep, ep, columns, ep, pairs(rows));
      microgemm<true>(ds_pairs, 1, kColumns, qp, dp, dk_sum + j0 * dp, dp, columns, dp,
                      pairs(rows));
      microgemm<true>(in_pairs(ds_rows), kColumns / 2, 1, kp + j0 / 2 * dp, dp, dq_sum, dp, rows,
                      dp, pairs(columns));
    }
    for (int64_t i = 0; i < rows; ++i)
      round_row(dq_sum + i * dp, h.d, dq + (i0 + i) * h.dq_row, scale);
  }
  for (int64_t j = 0; j < h.s; ++j) {
    round_row(dk_sum + j * dp, h.d, dk + j * h.dk_row, scale);
    round_row(dv_sum + j * ep, h.e, dv + j * h.dv_row, float(h.kept));
  }
}

int64_t workspace(const AttentionHead& h) {
  const int64_t dp = padded<float>(h.d), ep = padded<float>(h.e), sp = padded<float>(h.s);
  const int64_t forward = h.d / 2 * sp + pairs(h.s) * ep + kRows * (kColumns + kColumns / 2 + ep),
                tile = kRowsBackward * kColumnsBackward,
                backward = (h.d + h.e) / 2 * sp + pairs(h.s) * dp + h.s * (dp + ep) +
                           kRowsBackward * (dp + (dp + ep) / 2) + 3 * tile + tile / 2;
  return forward > backward ? forward : backward;
}

constexpr AttentionBf16Fns kFns{workspace, forward, backward};
#else
constexpr AttentionBf16Fns kFns{};
#endif

}  // namespace

template <>
const AttentionBf16Fns& isa_table<AttentionBf16Fns, isa::TESSERA_ISA>() {
  static const AttentionBf16Fns table = kFns;
  return table;
}

}  // namespace tessera::cpu
