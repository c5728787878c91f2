// Tiled attention of one head: Dao et al. 2022, "FlashAttention". Query rows are taken kRows at a
// time against kColumns keys; the scores of a tile stay in the first-level cache and [T, S] is
// never held. Operands are packed into rows of whole vectors first, which costs 1 / T of the work.
#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/kernels/attention_rows.h"
#include "core/backend/cpu/kernels/lanes.h"
#include "core/backend/cpu/kernels/microgemm.h"
#include "core/backend/cpu/kernels/tables.h"
#include "core/base/boundaries.h"
// clang-format off
#include "core/ops/functors/prelude.h"
#include "core/ops/functors/math.h"
// clang-format on

namespace tessera::cpu {
namespace {

constexpr int64_t kRows = limit("attention.rows"), kColumns = limit("attention.columns");

// to[i] = from[i] * scale.
template <class T>
void copy_row(const T* from, int64_t width, T* to, T scale) {
  using Vec = typename Vector<T>::type;
  int64_t d = 0;
  for (; d + kWidth<T> <= width; d += kWidth<T>)
    *reinterpret_cast<Vec*>(to + d) = *reinterpret_cast<const Vec*>(from + d) * (scale - Vec{});
  for (; d < width; ++d) to[d] = from[d] * scale;
}

// to[i, :] = from[i, :] * scale, zeros up to the padded width.
template <class T>
void pack(const T* from, int64_t row, int64_t rows, int64_t width, T* to, int64_t to_row, T scale) {
  for (int64_t i = 0; i < rows; ++i) {
    copy_row(from + i * row, width, to + i * to_row, scale);
    for (int64_t d = width; d < to_row; ++d) to[i * to_row + d] = T(0);
  }
}

// to[d, i] = from[i, d]: rows of the result are columns of the operand, zeros up to the padded
// width.
template <class T>
void pack_transposed(const T* from, int64_t row, int64_t rows, int64_t width, T* to,
                     int64_t to_row) {
  for (int64_t d = 0; d < width; ++d)
    for (int64_t i = rows; i < to_row; ++i) to[d * to_row + i] = T(0);
  transpose(from, row, rows, width, to, to_row);
}

// Over rows of whole groups, in kGroup interleaved lanes that meet in a balanced tree. Floats run
// in groups, whose sums stay in registers.
template <class T>
T row_max(const T* x, int64_t n) {
  T lane[kGroup];
  for (int i = 0; i < kGroup; ++i) lane[i] = T(-__builtin_inf());
  for (int64_t k = 0; k < n; k += kGroup)
    for (int i = 0; i < kGroup; ++i) lane[i] = x[k + i] > lane[i] ? x[k + i] : lane[i];
  return fold<LaneMax, kGroup>(lane);
}
float row_max(const float* x, int64_t n) {
  Group high(-fn::inf());
  for (int64_t k = 0; k < n; k += kGroup) high = larger(load_group(x + k), high);
  return highest_of(high);
}

// x = exp(x - top), or zeros where words, which may be null, drop them; returns the sum of all.
template <class T>
T exp_sum(T* x, int64_t n, T top, const uint32_t* words, uint32_t threshold) {
  T lane[kGroup];
  for (int i = 0; i < kGroup; ++i) lane[i] = T(0);
  for (int64_t k = 0; k < n; k += kGroup)
    for (int i = 0; i < kGroup; ++i) lane[i] += x[k + i] = fn::exp_by_table(x[k + i] - top);
  for (int64_t k = 0; words && k < n; ++k) x[k] = keep_one(x[k], words[k], threshold);
  return fold<LaneSum, kGroup>(lane);
}
float exp_sum(float* x, int64_t n, float top, const uint32_t* words, uint32_t threshold) {
  Group sum(0.0f);
  for (int64_t k = 0; k < n; k += kGroup) {
    const Group e = fn::exp_by_table(load_group(x + k) - Group(top));
    store(x + k, words ? keep(e, words + k, threshold) : e), sum = sum + e;
  }
  return sum_of(sum);
}

// p = exp(x - shift), y = p (y - delta), x = p. With words, of weights that are dropped: x = 0 and
// y counts as 0; of others y counts as y kept.
template <class T>
void probabilities(T* x, T* y, int64_t n, T shift, T delta, const uint32_t* words,
                   uint32_t threshold, T kept) {
  for (int64_t c = 0; words && c < n; ++c) y[c] = keep_one(y[c] * kept, words[c], threshold);
  for (int64_t c = 0; c < n; ++c)
    x[c] = fn::exp_by_table(x[c] - shift), y[c] = x[c] * (y[c] - delta);
  for (int64_t c = 0; words && c < n; ++c) x[c] = keep_one(x[c], words[c], threshold);
}
void probabilities(float* x, float* y, int64_t n, float shift, float delta, const uint32_t* words,
                   uint32_t threshold, float kept) {
  for (int64_t c = 0; c < n; c += kGroup) {
    const Group e = fn::exp_by_table(load_group(x + c) - Group(shift)), d = load_group(y + c);
    if (words) {
      store(x + c, keep(e, words + c, threshold));
      store(y + c, e * (keep(d * Group(kept), words + c, threshold) - Group(delta)));
    } else {
      store(x + c, e), store(y + c, e * (d - Group(delta)));
    }
  }
}

template <class T>
T dot(const T* a, const T* b, int64_t n) {
  T lane[kGroup] = {};
  int64_t i = 0;
  for (; i + kGroup <= n; i += kGroup)
    for (int l = 0; l < kGroup; ++l) lane[l] += a[i + l] * b[i + l];
  for (int l = 0; i + l < n; ++l) lane[l] += a[i + l] * b[i + l];
  return fold<LaneSum, kGroup>(lane);
}
float dot(const float* a, const float* b, int64_t n) {
  if (n % kGroup) return dot<float>(a, b, n);
  Group sum(0.0f);
  for (int64_t i = 0; i < n; i += kGroup) sum = sum + load_group(a + i) * load_group(b + i);
  return sum_of(sum);
}

template <class T>
void forward(const AttentionHead& h, const AttentionIn<T>& in, const AttentionIn<T>& next, T* out,
             T* lse, T* work) {
  const int64_t dp = padded<T>(h.d), ep = padded<T>(h.e), sp = padded<T>(h.s);
  T* kt = work;                       // [d, sp]
  T* vp = kt + h.d * sp;              // [s, ep]
  T* qp = vp + h.s * ep;              // [kRows, dp]
  T* score = qp + kRows * dp;         // [kRows, kColumns]
  T* acc = score + kRows * kColumns;  // [kRows, ep]
  pack_transposed(in.k, h.k_row, h.s, h.d, kt, sp);
  pack(in.v, h.v_row, h.s, h.e, vp, ep, T(1));
  uint32_t words[kColumns + kGroup] = {};
  for (int64_t i0 = 0; i0 < h.t; i0 += kRows) {
    const int64_t rows = least(kRows, h.t - i0);
    pack(in.q + i0 * h.q_row, h.q_row, rows, h.d, qp, dp, T(h.scale));
    T top[kRows], sum[kRows];
    for (int64_t i = 0; i < rows; ++i) top[i] = T(-__builtin_inf()), sum[i] = T(0);
    for (int64_t i = 0; i < rows * ep; ++i) acc[i] = T(0);
    const int64_t keys = h.causal ? least(h.s, i0 + rows) : h.s;
    for (int64_t j0 = 0; j0 < keys; j0 += kColumns) {
      const int64_t columns = least(kColumns, keys - j0), wide = groups(columns);
      if (hidden(h, in, j0, columns)) continue;
      microgemm<false>(qp, dp, 1, kt + j0, sp, score, kColumns, rows, padded<T>(columns), h.d);
      for (int64_t i = 0; i < rows; ++i) {
        if (j0 == 0) {
          fetch_row(h, next, i0 + i);
          fetch_to_write(out + (i0 + i) * h.out_row, h.e);
        }
        T* x = score + i * kColumns;
        const int64_t n = visible(h, i0 + i, j0, columns);
        if (n == 0) {  // exp(-inf - -inf) must not be formed
          for (int64_t c = 0; c < columns; ++c) x[c] = T(0);
          continue;
        }
        if (in.masked()) apply_mask(h, in, i0 + i, j0, n, T(1), x);
        for (int64_t c = n; c < wide; ++c) x[c] = T(-__builtin_inf());
        T high = row_max(x, wide);
        high = high > top[i] ? high : top[i];
        if (high == T(-__builtin_inf()) && !any_nan(x, n)) {  // nor here
          for (int64_t c = 0; c < wide; ++c) x[c] = T(0);
          continue;
        }
        T keep = top[i] == high ? T(1) : j0 == 0 ? T(0) : fn::exp(top[i] - high);
        sum[i] =
            sum[i] * keep + exp_sum(x, wide, high, draw(h, in, i0 + i, j0, n, words), h.threshold);
        top[i] = high;
        if (keep != T(1) && j0 > 0)
          for (int64_t e = 0; e < ep; ++e) acc[i * ep + e] *= keep;
      }
      microgemm<true>(score, kColumns, 1, vp + j0 * ep, ep, acc, ep, rows, ep, columns);
    }
    for (int64_t i = 0; i < rows; ++i) {
      const bool none = in.masked() && sum[i] == T(0);
      copy_row(acc + i * ep, h.e, out + (i0 + i) * h.out_row, none ? T(0) : T(h.kept) / sum[i]);
      lse[i0 + i] = none ? T(__builtin_inf()) : top[i] + fn::log(sum[i]);
    }
  }
}

// P = exp(S - lse); dV = P' dO; dP = dO V'; dS = P (dP - delta) with delta = rowsum(dO O); dQ =
// scale dS K; dK = scale dS' Q. Dropout multiplies P in dV, and dP, by 0 or `kept`; delta is
// rowsum(P dP) of that dP.
template <class T>
void backward(const AttentionHead& h, const AttentionIn<T>& in, const AttentionIn<T>& next, T* dq,
              T* dk, T* dv, T* work) {
  const int64_t dp = padded<T>(h.d), ep = padded<T>(h.e), sp = padded<T>(h.s);
  T* kt = work;              // [d, sp]
  T* vt = kt + h.d * sp;     // [e, sp]
  T* kp = vt + h.e * sp;     // [s, dp]
  T* dkp = kp + h.s * dp;    // [s, dp]
  T* dvp = dkp + h.s * dp;   // [s, ep]
  T* qp = dvp + h.s * ep;    // [kRows, dp]
  T* gp = qp + kRows * dp;   // [kRows, ep]
  T* dqp = gp + kRows * ep;  // [kRows, dp]
  T* p = dqp + kRows * dp;   // [kRows, kColumns]
  T* ds = p + kRows * kColumns;
  pack_transposed(in.k, h.k_row, h.s, h.d, kt, sp);
  pack_transposed(in.v, h.v_row, h.s, h.e, vt, sp);
  pack(in.k, h.k_row, h.s, h.d, kp, dp, T(1));
  for (int64_t i = 0; i < h.s * (dp + ep); ++i) dkp[i] = T(0);
  uint32_t words[kColumns + kGroup] = {};
  for (int64_t i0 = 0; i0 < h.t; i0 += kRows) {
    const int64_t rows = least(kRows, h.t - i0);
    pack(in.q + i0 * h.q_row, h.q_row, rows, h.d, qp, dp, T(h.scale));
    pack(in.g + i0 * h.g_row, h.g_row, rows, h.e, gp, ep, T(1));
    T delta[kRows];
    for (int64_t i = 0; i < rows; ++i)
      delta[i] = dot(gp + i * ep, in.out + (i0 + i) * h.out_row, h.e);
    for (int64_t i = 0; i < rows * dp; ++i) dqp[i] = T(0);
    const int64_t keys = h.causal ? least(h.s, i0 + rows) : h.s;
    for (int64_t j0 = 0; j0 < keys; j0 += kColumns) {
      const int64_t columns = least(kColumns, keys - j0), wide = padded<T>(columns);
      if (hidden(h, in, j0, columns)) continue;
      microgemm<false>(qp, dp, 1, kt + j0, sp, p, kColumns, rows, wide, h.d);
      microgemm<false>(gp, ep, 1, vt + j0, sp, ds, kColumns, rows, wide, h.e);
      for (int64_t i = 0; i < rows; ++i) {
        if (j0 == 0) fetch_row_backward(h, next, i0 + i, dq, dk, dv);
        T *x = p + i * kColumns, *y = ds + i * kColumns;
        const int64_t n = visible(h, i0 + i, j0, columns);
        if (in.masked()) apply_mask(h, in, i0 + i, j0, n, T(1), x);
        probabilities(x, y, groups(n), in.lse[i0 + i], delta[i], draw(h, in, i0 + i, j0, n, words),
                      h.threshold, T(h.kept));
        for (int64_t c = n; c < wide; ++c) x[c] = y[c] = T(0);
      }
      microgemm<true>(p, 1, kColumns, gp, ep, dvp + j0 * ep, ep, columns, ep, rows);
      microgemm<true>(ds, 1, kColumns, qp, dp, dkp + j0 * dp, dp, columns, dp, rows);
      microgemm<true>(ds, kColumns, 1, kp + j0 * dp, dp, dqp, dp, rows, dp, columns);
    }
    for (int64_t i = 0; i < rows; ++i)
      copy_row(dqp + i * dp, h.d, dq + (i0 + i) * h.dq_row, T(h.scale));
  }
  for (int64_t j = 0; j < h.s; ++j) {
    copy_row(dkp + j * dp, h.d, dk + j * h.dk_row, T(1));
    copy_row(dvp + j * ep, h.e, dv + j * h.dv_row, T(h.kept));
  }
}

template <class T>
int64_t workspace(const AttentionHead& h) {
  const int64_t dp = padded<T>(h.d), ep = padded<T>(h.e), sp = padded<T>(h.s);
  return (h.d + h.e) * sp + h.s * (2 * dp + ep) + h.s * ep +
         kRows * (2 * dp + 2 * ep + 2 * kColumns);
}

}  // namespace

template <>
const AttentionTable& isa_table<AttentionTable, isa::TESSERA_ISA>() {
  static const AttentionTable table{{workspace<float>, forward<float>, backward<float>},
                                    {workspace<double>, forward<double>, backward<double>}};
  return table;
}

}  // namespace tessera::cpu
