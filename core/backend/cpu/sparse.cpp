// Segments and sparse products: loops in kernels/reduce.cpp and kernels/sparse.cpp. Structure is
// checked before it is used. Invariant: work is cut over rows (or segments), at places that depend
// on the structure only, and a row is computed whole by one thread.
#include <algorithm>
#include <ranges>
#include <vector>

#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/kernels/sparse_table.h"
#include "core/backend/cpu/register.h"
#include "core/backend/cpu/widen.h"
#include "core/base/boundary.h"
#include "core/ops/dim_attributes.h"
#include "core/ops/sparse_attributes.h"
#include "core/primitive/primitive_of.h"

namespace tessera::cpu {
namespace {

constexpr int64_t kGrain = 16384;  // elements worth a thread

void plan_all_dense(const Primitive&, std::span<const Tensor>, std::span<Meta>, Plan& plan) {
  plan.all_dense = true;
}

// `offsets` [n + 1] must rise from 0 to `end`.
void check_offsets(const Primitive& p, const char* what, const Tensor& offsets, int64_t end) {
  const int64_t *x = offsets.values<int64_t>(), n = offsets.numel() - 1;
  TESSERA_CHECK(x[0] == 0, "{}: {}[0] is {}; it must be 0", p.name(), what, x[0]);
  for (int64_t i = 0; i < n; ++i)
    TESSERA_CHECK(x[i] <= x[i + 1], "{}: {} falls from {} to {} at {}", p.name(), what, x[i],
                  x[i + 1], i + 1);
  TESSERA_CHECK(x[n] == end, "{}: {}[{}] is {}; it must be the number of elements, {}", p.name(),
                what, n, x[n], end);
}

void check_columns(const Primitive& p, const Tensor& col, int64_t columns) {
  const int64_t* x = col.values<int64_t>();
  for (int64_t e = 0; e < col.numel(); ++e)
    TESSERA_CHECK(x[e] >= 0 && x[e] < columns, "{}: col[{}] is {}, outside {} columns", p.name(), e,
                  x[e], columns);
}

template <class T>
auto reduce_fn(ReduceKind kind) {
  const ReduceTable& t = simd<ReduceTable>();
  if constexpr (std::is_same_v<T, float>)
    return t.f32[int(kind)];
  else
    return t.f64[int(kind)];
}

template <class T>
const SparseFns<T>& sparse_fns() {
  if constexpr (std::is_same_v<T, float>)
    return simd<SparseTable>().f32;
  else
    return simd<SparseTable>().f64;
}

// Calls f with a zero of the type that floats of `t` are computed in.
template <class F>
void by_float(DType t, F f) {
  if (t == kF64)
    f(double());
  else
    f(float());
}

// Calls run(in, out) with 16-bit floats widened.
template <class F>
void wide(std::span<const Tensor> in, std::span<const Tensor> out, DType t, F run) {
  if (size_of(t) == 2)
    through_f32(in, out, t, run);
  else
    run(in, out);
}

// Calls body(first, last) over rows, cut where pieces have about equally many edges and rows.
template <class F>
void over_rows(const int64_t* crow, int64_t rows, int64_t work_per_edge, F body) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(work_per_edge, 1));
  // The first row before which so many edges and rows lie.
  auto row_at = [&](int64_t at) {
    auto before = [&](int64_t row) { return crow[row] + row; };
    return *std::ranges::lower_bound(std::views::iota(int64_t(0), rows + 1), at, {}, before);
  };
  parallel_for("sparse.threads", crow[rows] + rows, grain, [&](int64_t begin, int64_t end) {
    if (int64_t first = row_at(begin), last = row_at(end); first < last) body(first, last);
  });
}

void run_segment(const Primitive& p, std::span<const Tensor> in, std::span<const Tensor> out,
                 Workspace, const Stream&) {
  const auto& a = attributes_of<SegmentAttributes>(p);
  Around r(in[0].shape(), a.dim);
  check_offsets(p, "offsets", in[1], r.n);
  const int64_t *offsets = in[1].values<int64_t>(), segments = in[1].numel() - 1;
  if (out[0].numel() == 0) return;
  wide(in, out, out[0].dtype(), [&](auto from, auto to) {
    by_float(out[0].dtype(), [&](auto zero) {
      using T = decltype(zero);
      const T* x = from[0].template values<T>();
      T* y = to[0].template data<T>();
      auto reduce = reduce_fn<T>(a.kind);
      for (int64_t o = 0; o < r.outer; ++o)
        over_rows(offsets, segments, r.inner, [&](int64_t first, int64_t last) {
          for (int64_t s = first; s < last; ++s)
            reduce(x + (o * r.n + offsets[s]) * r.inner, y + (o * segments + s) * r.inner,
                   offsets[s + 1] - offsets[s], r.inner, 0, 1);
        });
    });
  });
}

// Calls body(fns, first, last) on the rows of crow, col, values, dense -> [M, K].
template <class F>
void run_rows(const Primitive& p, std::span<const Tensor> in, int64_t columns, int64_t k, F body) {
  check_offsets(p, "crow", in[0], in[1].numel());
  check_columns(p, in[1], columns);
  meet("sparse.lanes", k);
  over_rows(in[0].values<int64_t>(), in[0].numel() - 1, k, body);
}

void run_spmm(const Primitive& p, std::span<const Tensor> in, std::span<const Tensor> out,
              Workspace, const Stream&) {
  const int64_t *crow = in[0].values<int64_t>(), *col = in[1].values<int64_t>(),
                k = in[3].shape()[1];
  wide(in, out, out[0].dtype(), [&](auto from, auto to) {
    by_float(out[0].dtype(), [&](auto zero) {
      using T = decltype(zero);
      const T *values = from[2].template values<T>(), *dense = from[3].template values<T>();
      T* y = to[0].template data<T>();
      meet("sparse.columns", k, sparse_fns<T>().columns);
      run_rows(p, in, in[3].shape()[0], k, [&](int64_t first, int64_t last) {
        for (int64_t m = first; m < last; ++m)
          sparse_fns<T>().sum(values + crow[m], col + crow[m], crow[m + 1] - crow[m], dense, k,
                              y + m * k);
      });
    });
  });
}

template <bool kLargest>
void run_spmm_extreme(const Primitive& p, std::span<const Tensor> in, std::span<const Tensor> out,
                      Workspace, const Stream&) {
  const int64_t *crow = in[0].values<int64_t>(), *col = in[1].values<int64_t>(),
                k = in[3].shape()[1];
  int64_t* at = out[1].data<int64_t>();
  wide(in, out, out[0].dtype(), [&](auto from, auto to) {
    by_float(out[0].dtype(), [&](auto zero) {
      using T = decltype(zero);
      const T *values = from[2].template values<T>(), *dense = from[3].template values<T>();
      T* y = to[0].template data<T>();
      auto choose = kLargest ? sparse_fns<T>().largest : sparse_fns<T>().smallest;
      run_rows(p, in, in[3].shape()[0], k, [&](int64_t first, int64_t last) {
        for (int64_t m = first; m < last; ++m) {
          const int64_t e = crow[m], edges = crow[m + 1] - e;
          if (edges == 0) {
            std::fill_n(y + m * k, k, T(0)), std::fill_n(at + m * k, k, int64_t(-1));
            continue;
          }
          choose(values + e, col + e, edges, dense, k, e, y + m * k, at + m * k);
        }
      });
    });
  });
}

void run_sddmm(const Primitive& p, std::span<const Tensor> in, std::span<const Tensor> out,
               Workspace, const Stream&) {
  const int64_t *crow = in[0].values<int64_t>(), *col = in[1].values<int64_t>(),
                k = in[3].shape()[1];
  wide(in, out, out[0].dtype(), [&](auto from, auto to) {
    by_float(out[0].dtype(), [&](auto zero) {
      using T = decltype(zero);
      const T *a = from[2].template values<T>(), *b = from[3].template values<T>();
      T* y = to[0].template data<T>();
      run_rows(p, in, in[3].shape()[0], k, [&](int64_t first, int64_t last) {
        for (int64_t m = first; m < last; ++m)
          sparse_fns<T>().dots(a + m * k, b, col + crow[m], crow[m + 1] - crow[m], k, y + crow[m]);
      });
    });
  });
}

// A counting sort by column, stable in the edges.
void run_csr_transpose(const Primitive& p, std::span<const Tensor> in, std::span<const Tensor> out,
                       Workspace, const Stream&) {
  const int64_t columns = attributes_of<CsrTransposeAttributes>(p).columns;
  check_offsets(p, "crow", in[0], in[1].numel());
  check_columns(p, in[1], columns);
  const int64_t *crow = in[0].values<int64_t>(), *col = in[1].values<int64_t>(),
                rows = in[0].numel() - 1, edges = in[1].numel();
  int64_t *begin = out[0].data<int64_t>(), *row = out[1].data<int64_t>(),
          *order = out[2].data<int64_t>();
  std::fill_n(begin, columns + 1, int64_t(0));
  for (int64_t e = 0; e < edges; ++e) ++begin[col[e] + 1];
  for (int64_t c = 0; c < columns; ++c) begin[c + 1] += begin[c];
  std::vector<int64_t> next(begin, begin + columns);
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t e = crow[m]; e < crow[m + 1]; ++e) {
      int64_t to = next[size_t(col[e])]++;
      row[to] = m, order[to] = e;
    }
}

}  // namespace

void register_sparse(KernelTable& t) {
  for (const char* op : {"segment_sum", "segment_prod", "segment_amax", "segment_amin"})
    t.add(DeviceKind::kCPU, op, {plan_all_dense, run_segment});
  t.add(DeviceKind::kCPU, "spmm", {plan_all_dense, run_spmm});
  t.add(DeviceKind::kCPU, "spmm_amax", {plan_all_dense, run_spmm_extreme<true>});
  t.add(DeviceKind::kCPU, "spmm_amin", {plan_all_dense, run_spmm_extreme<false>});
  t.add(DeviceKind::kCPU, "sddmm", {plan_all_dense, run_sddmm});
  t.add(DeviceKind::kCPU, "csr_transpose", {plan_all_dense, run_csr_transpose});
}

}  // namespace tessera::cpu
