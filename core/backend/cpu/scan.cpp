// Scans on [outer, n, inner]: the loop along n is serial, the inner ones are independent. 16-bit
// floats and narrow integers run wide.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/backend/cpu/register.h"
#include "core/backend/cpu/widen.h"
#include "core/base/boundary.h"
#include "core/ops/dim_attributes.h"
#include "core/primitive/primitive_of.h"

namespace tessera::cpu {
namespace {

constexpr int64_t kGrain = 16384;

template <uint32_t kDense>
void plan_dense(const Primitive&, std::span<const Tensor>, std::span<Meta>, Plan& plan) {
  plan.dense_in = kDense;
}

// Calls body(base, i) for the first element of every outer and each inner position: element k of
// that line is at base + k * inner.
template <class F>
void over_lines(const Around& a, F body) {
  parallel_for("scan.threads", a.outer,
               std::max<int64_t>(1, kGrain / std::max<int64_t>(a.n * a.inner, 1)),
               [&](int64_t begin, int64_t end) {
                 for (int64_t o = begin; o < end; ++o)
                   for (int64_t i = 0; i < a.inner; ++i) body(o * a.n * a.inner + i);
               });
}

// Runs loop(in..., out) in the type arithmetic is done in.
template <class F>
void run_wide(std::span<const Tensor> in, const Tensor& out, F loop) {
  DType compute = compute_dtype(out.dtype());
  SmallVector<Tensor, 2> wide;
  for (const Tensor& t : in) wide.push_back(converted(t, compute));
  Tensor result = compute == out.dtype() ? out : empty(out.shape(), compute, out.device());
  loop(wide, result);
  if (result.raw_values() != out.raw()) convert_into(result, out);
}

template <class T, class Join>
void accumulate(const Tensor& x, const Tensor& y, int dim, bool reverse, Join join) {
  const T* src = x.values<T>();
  T* dst = y.data<T>();
  Around a(x.shape(), dim);
  if (a.n == 0) return;
  int64_t first = reverse ? a.n - 1 : 0, step = reverse ? -a.inner : a.inner;
  over_lines(a, [&](int64_t base) {
    int64_t at = base + first * a.inner;
    T total = src[at];
    dst[at] = total;
    for (int64_t k = 1; k < a.n; ++k) {
      at += step;
      dst[at] = total = join(total, src[at]);
    }
  });
}

void run_cumsum(const Primitive& p, std::span<const Tensor> in, std::span<const Tensor> out,
                Workspace, const Stream&) {
  const auto& a = attributes_of<ScanAttributes>(p);
  run_wide(in, out[0], [&](const auto& x, const Tensor& y) {
    by_compute_type(y.dtype(), [&](auto t) {
      accumulate<decltype(t)>(x[0], y, a.dim, a.reverse, [](auto s, auto v) { return s + v; });
    });
  });
}

void run_cumprod(const Primitive& p, std::span<const Tensor> in, std::span<const Tensor> out,
                 Workspace, const Stream&) {
  int dim = attributes_of<DimAttributes>(p).dim;
  run_wide(in, out[0], [&](const auto& x, const Tensor& y) {
    by_compute_type(y.dtype(), [&](auto t) {
      accumulate<decltype(t)>(x[0], y, dim, false, [](auto s, auto v) { return s * v; });
    });
  });
}

void run_logcumsumexp(const Primitive& p, std::span<const Tensor> in, std::span<const Tensor> out,
                      Workspace, const Stream&) {
  int dim = attributes_of<DimAttributes>(p).dim;
  auto join = [](auto s, auto v) -> decltype(v) {
    auto high = s != s || s > v ? s : v, low = s != s || s > v ? v : s;
    return high == low ? high + std::log(decltype(v)(2)) : high + std::log1p(std::exp(low - high));
  };
  run_wide(in, out[0], [&](const auto& x, const Tensor& y) {
    if (y.dtype() == kF64)
      accumulate<double>(x[0], y, dim, false, join);
    else
      accumulate<float>(x[0], y, dim, false, join);
  });
}

template <class T>
void recur(const Tensor& factor, const Tensor& term, const Tensor& y, int dim, bool reverse) {
  const T *a = factor.values<T>(), *b = term.values<T>();
  T* dst = y.data<T>();
  Around r(y.shape(), dim);
  int64_t first = reverse ? r.n - 1 : 0, step = reverse ? -r.inner : r.inner;
  over_lines(r, [&](int64_t base) {
    int64_t at = base + first * r.inner;
    T last = T(0);
    for (int64_t k = 0; k < r.n; ++k, at += step) dst[at] = last = k ? a[at] * last + b[at] : b[at];
  });
}

void run_linear_scan(const Primitive& p, std::span<const Tensor> in, std::span<const Tensor> out,
                     Workspace, const Stream&) {
  const auto& a = attributes_of<ScanAttributes>(p);
  run_wide(in, out[0], [&](const auto& x, const Tensor& y) {
    if (y.dtype() == kF64)
      recur<double>(x[0], x[1], y, a.dim, a.reverse);
    else
      recur<float>(x[0], x[1], y, a.dim, a.reverse);
  });
}

template <bool kLargest>
void run_extreme(const Primitive& p, std::span<const Tensor> in, std::span<const Tensor> out,
                 Workspace, const Stream&) {
  Around r(in[0].shape(), attributes_of<DimAttributes>(p).dim);
  int64_t* index = out[1].data<int64_t>();
  if (in[0].numel() == 0) return;
  run_wide(in, out[0], [&](const auto& wide, const Tensor& y) {
    by_compute_type(y.dtype(), [&](auto t) {
      using T = decltype(t);
      const T* x = wide[0].template values<T>();
      T* values = y.data<T>();
      over_lines(r, [&](int64_t base) {
        T best = x[base];
        int64_t where = 0;
        for (int64_t k = 0; k < r.n; ++k) {
          T v = x[base + k * r.inner];
          if (v != v || (kLargest ? v >= best : v <= best)) best = v, where = k;
          values[base + k * r.inner] = best, index[base + k * r.inner] = where;
        }
      });
    });
  });
}

}  // namespace

void register_scan(KernelTable& t) {
  t.add(DeviceKind::kCPU, "cumsum", {plan_dense<1>, run_cumsum});
  t.add(DeviceKind::kCPU, "cumprod", {plan_dense<1>, run_cumprod});
  t.add(DeviceKind::kCPU, "logcumsumexp", {plan_dense<1>, run_logcumsumexp});
  t.add(DeviceKind::kCPU, "linear_scan", {plan_dense<3>, run_linear_scan});
  t.add(DeviceKind::kCPU, "cummax", {plan_dense<1>, run_extreme<true>});
  t.add(DeviceKind::kCPU, "cummin", {plan_dense<1>, run_extreme<false>});
}

}  // namespace tessera::cpu
