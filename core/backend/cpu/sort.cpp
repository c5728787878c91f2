// Kernels that order elements, row by row of [outer, n, inner]. Only positions are sorted; values
// are fetched once at the end, so one loop serves every dtype.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "core/backend/cpu/register.h"
#include "core/backend/cpu/widen.h"
#include "core/base/boundary.h"
#include "core/ops/dim_attributes.h"
#include "core/primitive/primitive_of.h"

namespace tessera::cpu {
namespace {

constexpr int64_t kGrain = 8192;

// NaN is the largest value and equal to itself.
template <class T>
bool below(T a, T b) {
  return a < b || (b != b && a == a);
}

void plan_dense(const Primitive&, std::span<const Tensor>, std::span<Meta>, Plan& plan) {
  plan.dense_in = 3;
}

// The first `count` positions of row `key` in order; equal elements keep theirs.
template <class T>
void order_row(const T* key, std::vector<int64_t>& position, int64_t count, bool descending) {
  std::iota(position.begin(), position.end(), int64_t(0));
  auto before = [&](int64_t a, int64_t b) {
    T x = key[a], y = key[b];
    if (descending ? below(y, x) : below(x, y)) return true;
    if (descending ? below(x, y) : below(y, x)) return false;
    return a < b;
  };
  if (count < int64_t(position.size())) {
    auto middle = position.begin() + count;
    std::nth_element(position.begin(), middle, position.end(), before);
    std::sort(position.begin(), middle, before);
  } else {
    std::sort(position.begin(), position.end(), before);
  }
}

template <class T>
void sort_rows(const Tensor& keys, const Tensor& indices, const SortAttributes& a) {
  const T* x = keys.values<T>();
  int64_t* out = indices.data<int64_t>();
  Around r(keys.shape(), a.dim);
  parallel_for("sort.threads", r.outer * r.inner,
               std::max<int64_t>(1, kGrain / std::max<int64_t>(r.n, 1)),
               [&](int64_t begin, int64_t end) {
                 std::vector<T> row(static_cast<size_t>(r.n));
                 std::vector<int64_t> position(static_cast<size_t>(r.n));
                 for (int64_t t = begin; t < end; ++t) {
                   int64_t o = t / r.inner, i = t % r.inner;
                   for (int64_t k = 0; k < r.n; ++k)
                     row[size_t(k)] = x[(o * r.n + k) * r.inner + i];
                   order_row(row.data(), position, a.count, a.descending);
                   for (int64_t k = 0; k < a.count; ++k)
                     out[(o * a.count + k) * r.inner + i] = position[size_t(k)];
                 }
               });
}

void run_sort(const Primitive& p, std::span<const Tensor> in, std::span<const Tensor> out,
              Workspace, const Stream&) {
  const auto& a = attributes_of<SortAttributes>(p);
  Tensor keys = converted(in[0], compute_dtype(in[0].dtype()));
  by_compute_type(in[0].dtype(), [&](auto t) { sort_rows<decltype(t)>(keys, out[1], a); });
  Around r(in[0].shape(), a.dim);
  const int64_t* index = out[1].values<int64_t>();
  auto* src = static_cast<const char*>(in[0].raw_values());
  auto* dst = static_cast<char*>(out[0].raw());
  size_t size = size_of(in[0].dtype());
  for (int64_t e = 0; e < out[0].numel(); ++e) {
    int64_t i = e % r.inner, o = e / (r.inner * a.count);
    std::memcpy(dst + size_t(e) * size, src + size_t((o * r.n + index[e]) * r.inner + i) * size,
                size);
  }
}

template <class T, bool kLargest>
void extreme_rows(const Tensor& keys, const Tensor& out, int dim) {
  const T* x = keys.values<T>();
  int64_t* y = out.data<int64_t>();
  Around r(keys.shape(), dim);
  parallel_for(
      "argmax.threads", r.outer, std::max<int64_t>(1, kGrain / std::max<int64_t>(r.n * r.inner, 1)),
      [&](int64_t begin, int64_t end) {
        for (int64_t o = begin; o < end; ++o)
          for (int64_t i = 0; i < r.inner; ++i) {
            const T* row = x + o * r.n * r.inner + i;
            int64_t best = 0;
            for (int64_t k = 1; k < r.n && row[best * r.inner] == row[best * r.inner]; ++k) {
              T a = row[k * r.inner], b = row[best * r.inner];
              if ((kLargest ? a > b : a < b) || a != a) best = k;
            }
            y[o * r.inner + i] = best;
          }
      });
}

template <bool kLargest>
void run_extreme(const Primitive& p, std::span<const Tensor> in, std::span<const Tensor> out,
                 Workspace, const Stream&) {
  Tensor keys = converted(in[0], compute_dtype(in[0].dtype()));
  by_compute_type(in[0].dtype(), [&](auto t) {
    extreme_rows<decltype(t), kLargest>(keys, out[0], attributes_of<DimAttributes>(p).dim);
  });
}

void run_search(const Primitive& p, std::span<const Tensor> in, std::span<const Tensor> out,
                Workspace, const Stream&) {
  bool right = attributes_of<SearchAttributes>(p).right;
  DType compute = compute_dtype(in[0].dtype());
  Tensor edges = converted(in[0], compute), x = converted(in[1], compute);
  int64_t n = edges.shape().back(), rows = edges.numel() / std::max<int64_t>(n, 1),
          each = x.numel() / std::max<int64_t>(rows, 1);
  by_compute_type(compute, [&](auto t) {
    using T = decltype(t);
    for (int64_t e = 0; e < x.numel(); ++e) {
      const T* row = edges.values<T>() + (rows > 1 ? e / each : 0) * n;
      T value = x.values<T>()[e];
      const T* at = right ? std::upper_bound(row, row + n, value, below<T>)
                          : std::lower_bound(row, row + n, value, below<T>);
      out[0].data<int64_t>()[e] = at - row;
    }
  });
}

}  // namespace

void register_sort(KernelTable& t) {
  t.add(DeviceKind::kCPU, "sort", {plan_dense, run_sort});
  t.add(DeviceKind::kCPU, "argmax", {plan_dense, run_extreme<true>});
  t.add(DeviceKind::kCPU, "argmin", {plan_dense, run_extreme<false>});
  t.add(DeviceKind::kCPU, "searchsorted", {plan_dense, run_search});
}

}  // namespace tessera::cpu
