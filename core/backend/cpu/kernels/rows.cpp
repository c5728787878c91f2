// Softmax and normalisation over dense rows. Sums run in kLanes interleaved lanes that meet in a
// balanced tree, so the order is a property of the row's length and loops vectorise without
// reassociation.
#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/kernels/lanes.h"
#include "core/backend/cpu/kernels/tables.h"
#include "core/backend/cpu/kernels/vector.h"
#include "core/base/boundaries.h"
// Each text needs the one before it.
// clang-format off
#include "core/ops/functors/prelude.h"
#include "core/ops/functors/math.h"
// clang-format on

namespace tessera::cpu {
namespace {

constexpr int kLanes = limit("rows.lanes");
static_assert(kLanes == kGroup);

template <class T>
struct Lanes {
  T v[kLanes];
  explicit Lanes(T start) {
    for (int i = 0; i < kLanes; ++i) v[i] = start;
  }
  T sum() { return fold<LaneSum, kLanes>(v); }
  T max() { return fold<LaneMax, kLanes>(v); }
};

// sum over k of term(at), where at(p) stands for p[k]; in lanes. Floats are taken in groups, whose
// sums stay in registers.
template <class T, class F>
inline __attribute__((always_inline)) T sum_of(int64_t n, F term) {
  Lanes<T> s(0);
  int64_t k = 0;
  if constexpr (sizeof(T) == 4) {
    Group sum(0.0f);
    for (; k + kLanes <= n; k += kLanes)
      sum = sum + term([&](const float* p) { return load_group(p + k); });
    if (k == n) return sum_of(sum);
    store(s.v, sum);
  } else {
    for (; k + kLanes <= n; k += kLanes)
      for (int i = 0; i < kLanes; ++i) s.v[i] += term([&](const T* p) { return p[k + i]; });
  }
  for (int i = 0; k + i < n; ++i) s.v[i] += term([&](const T* p) { return p[k + i]; });
  return s.sum();
}

template <class T>
T max_of(const T* x, int64_t n) {
  Lanes<T> m(T(-__builtin_inf()));
  int64_t k = 0;
  for (; k + kLanes <= n; k += kLanes)
    for (int i = 0; i < kLanes; ++i)
      m.v[i] = x[k + i] > m.v[i] || x[k + i] != x[k + i] ? x[k + i] : m.v[i];
  for (int i = 0; k + i < n; ++i)
    m.v[i] = x[k + i] > m.v[i] || x[k + i] != x[k + i] ? x[k + i] : m.v[i];
  return m.max();
}

// e[k] = exp(x[k] - top), and their sum.
template <class T>
T exp_row(const T* x, T* e, int64_t n, T top) {
  Lanes<T> s(0);
  int64_t k = 0;
  if constexpr (sizeof(T) == 4) {
    Group sum(0.0f);
    for (; k + kLanes <= n; k += kLanes) {
      const Group g = fn::exp_by_table(load_group(x + k) - top);
      store(e + k, g), sum = sum + g;
    }
    if (k == n) return sum_of(sum);
    store(s.v, sum);
  }
  for (; k < n; ++k) s.v[k % kLanes] += e[k] = fn::exp_by_table(x[k] - top);
  return s.sum();
}

template <class T>
void softmax(const T* x, T* y, int64_t n, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r, x += n, y += n) {
    T top = max_of(x, n), scale = T(1) / exp_row(x, y, n, top);
    for (int64_t k = 0; k < n; ++k) y[k] *= scale;
  }
}

template <class T>
T logsumexp_row(const T* x, int64_t n) {
  T top = max_of(x, n);
  if (top == T(-__builtin_inf())) return top;
  return top + fn::log(sum_of<T>(n, [&](auto at) { return fn::exp_by_table(at(x) - top); }));
}

template <class T>
void log_softmax(const T* x, T* y, int64_t n, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r, x += n, y += n) {
    T top = max_of(x, n),
      rest = fn::log(sum_of<T>(n, [&](auto at) { return fn::exp_by_table(at(x) - top); }));
    for (int64_t k = 0; k < n; ++k) y[k] = (x[k] - top) - rest;
  }
}

template <class T>
void softmax_grad(const T* y, const T* g, T* dx, int64_t n, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r, y += n, g += n, dx += n) {
    T dot = sum_of<T>(n, [&](auto at) { return at(g) * at(y); });
    for (int64_t k = 0; k < n; ++k) dx[k] = y[k] * (g[k] - dot);
  }
}

template <class T>
void log_softmax_grad(const T* y, const T* g, T* dx, int64_t n, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r, y += n, g += n, dx += n) {
    T total = sum_of<T>(n, [&](auto at) { return at(g); });
    int64_t k = 0;
    if constexpr (sizeof(T) == 4)
      for (; k + kLanes <= n; k += kLanes)
        store(dx + k, load_group(g + k) - fn::exp_by_table(load_group(y + k)) * total);
    for (; k < n; ++k) dx[k] = g[k] - fn::exp_by_table(y[k]) * total;
  }
}

template <class T>
void logsumexp(const T* x, T* lse, int64_t n, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) lse[r] = logsumexp_row(x + r * n, n);
}

template <class T>
T softmax_scaled(const T* x, T* e, int64_t n, T scale) {
  T top = max_of(x, n), total = exp_row(x, e, n, top), factor = scale / total;
  for (int64_t k = 0; k < n; ++k) e[k] *= factor;
  return top + fn::log(total);
}

template <class T>
void norm(const T* x, const T* w, const T* b, T* y, T* mean, T* rstd, int64_t n, int64_t rows,
          T eps, bool centred) {
  for (int64_t r = 0; r < rows; ++r, x += n, y += n) {
    T mu = centred ? sum_of<T>(n, [&](auto at) { return at(x); }) / T(n) : T(0);
    T var = sum_of<T>(n, [&](auto at) { return (at(x) - mu) * (at(x) - mu); }) / T(n);
    T scale = T(1) / fn::sqrt(var + eps);
    if (mean) mean[r] = mu;
    rstd[r] = scale;
    if (w && b)
      for (int64_t k = 0; k < n; ++k) y[k] = (x[k] - mu) * scale * w[k] + b[k];
    else if (w)
      for (int64_t k = 0; k < n; ++k) y[k] = (x[k] - mu) * scale * w[k];
    else if (b)
      for (int64_t k = 0; k < n; ++k) y[k] = (x[k] - mu) * scale + b[k];
    else
      for (int64_t k = 0; k < n; ++k) y[k] = (x[k] - mu) * scale;
  }
}

// With h = (x - mean) rstd and q = g w: dx = rstd (q - mean(q) - h mean(q h)); rms-norm has no
// mean(q).
template <class T>
void norm_grad(const T* g, const T* x, const T* w, const T* mean, const T* rstd, T* dx, T* dw,
               T* db, int64_t n, int64_t rows, bool centred) {
  for (int64_t r = 0; r < rows; ++r, g += n, x += n) {
    T mu = centred ? mean[r] : T(0), s = rstd[r];
    if (dw)
      for (int64_t k = 0; k < n; ++k) dw[k] += g[k] * ((x[k] - mu) * s);
    if (db)
      for (int64_t k = 0; k < n; ++k) db[k] += g[k];
    if (!dx) continue;
    T total = 0, dot;
    if (w) {
      if (centred) total = sum_of<T>(n, [&](auto at) { return at(g) * at(w); }) / T(n);
      dot = sum_of<T>(n, [&](auto at) { return at(g) * at(w) * ((at(x) - mu) * s); }) / T(n);
      for (int64_t k = 0; k < n; ++k) dx[k] = s * (g[k] * w[k] - total - (x[k] - mu) * s * dot);
    } else {
      if (centred) total = sum_of<T>(n, [&](auto at) { return at(g); }) / T(n);
      dot = sum_of<T>(n, [&](auto at) { return at(g) * ((at(x) - mu) * s); }) / T(n);
      for (int64_t k = 0; k < n; ++k) dx[k] = s * (g[k] - total - (x[k] - mu) * s * dot);
    }
    dx += n;
  }
}

template <class T>
constexpr RowFns<T> fns() {
  return {softmax<T>,   log_softmax<T>,    softmax_grad<T>, log_softmax_grad<T>,
          logsumexp<T>, softmax_scaled<T>, norm<T>,         norm_grad<T>};
}

// Kingma, Ba 2015; decoupled decay: Loshchilov, Hutter 2019. No decay is no multiple of 0, which an
// infinite parameter would make NaN.
template <class T, bool kCoupled>
TESSERA_FN void adam_as(const T* p, const T* g, const T* m, const T* v, T* p2, T* m2, T* v2,
                        int64_t n, const AdamStep& s) {
  const T scale = T(s.grad_scale), beta1 = T(s.beta1), beta2 = T(s.beta2), rest1 = T(1 - s.beta1),
          rest2 = T(1 - s.beta2), eps = T(s.eps);
  const T decay = T(s.weight_decay), keep = s.decoupled ? T(1 - s.lr * s.weight_decay) : T(1);
  const T step = T(s.lr / s.correction1), inverse_root = T(1 / __builtin_sqrt(s.correction2));
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    T grad = g[i] * scale;
    if constexpr (kCoupled) grad = grad + decay * p[i];
    T mi = beta1 * m[i] + rest1 * grad, vi = beta2 * v[i] + rest2 * grad * grad;
    m2[i] = mi, v2[i] = vi;
    p2[i] = p[i] * keep - step * mi / (fn::sqrt(vi) * inverse_root + eps);
  }
}

template <class T>
void adam(const T* p, const T* g, const T* m, const T* v, T* p2, T* m2, T* v2, int64_t n,
          const AdamStep& s) {
  !s.decoupled&& s.weight_decay != 0 ? adam_as<T, true>(p, g, m, v, p2, m2, v2, n, s)
                                     : adam_as<T, false>(p, g, m, v, p2, m2, v2, n, s);
}

template <class T>
double sum_squares(const T* x, int64_t n) {
  constexpr int64_t kBlock = limit("squares.block");
  if (n <= kBlock) return double(sum_of<T>(n, [&](auto at) { return at(x) * at(x); }));
  int64_t blocks = (n + kBlock - 1) / kBlock, left = (blocks + 1) / 2 * kBlock;
  return sum_squares(x, left) + sum_squares(x + left, n - left);
}

template <class T, bool kMomentum, bool kDecay>
TESSERA_FN void sgd_as(const T* p, const T* g, const T* b, T* p2, T* b2, int64_t n,
                       const SgdStep& s) {
  const T lr = T(s.lr), scale = T(s.grad_scale), decay = T(s.weight_decay),
          momentum = T(s.momentum), fresh = T(1 - s.dampening);
  const bool first = s.first, nesterov = s.nesterov;
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    T grad = g[i] * scale;
    if constexpr (kDecay) grad = grad + decay * p[i];
    if constexpr (kMomentum) {
      const T buffer = first ? grad : momentum * b[i] + fresh * grad;
      b2[i] = buffer;
      grad = nesterov ? grad + momentum * buffer : buffer;
    }
    p2[i] = p[i] - lr * grad;
  }
}
// Results may lie over their own operands, element by element.
template <class T>
void sgd(const T* p, const T* g, const T* b, T* p2, T* b2, int64_t n, const SgdStep& s) {
  const bool decay = s.weight_decay != 0;
  if (b)
    decay ? sgd_as<T, true, true>(p, g, b, p2, b2, n, s)
          : sgd_as<T, true, false>(p, g, b, p2, b2, n, s);
  else
    decay ? sgd_as<T, false, true>(p, g, b, p2, b2, n, s)
          : sgd_as<T, false, false>(p, g, b, p2, b2, n, s);
}

}  // namespace

template <>
const RowTable& isa_table<RowTable, isa::TESSERA_ISA>() {
  static const RowTable table{fns<float>(), fns<double>()};
  return table;
}

template <>
const UpdateTable& isa_table<UpdateTable, isa::TESSERA_ISA>() {
  static const UpdateTable table{{adam<float>, sum_squares<float>, sgd<float>},
                                 {adam<double>, sum_squares<double>, sgd<double>}};
  return table;
}

}  // namespace tessera::cpu
