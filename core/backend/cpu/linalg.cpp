// Factorisations by LAPACK and triangular systems by BLAS, matrix by matrix. LAPACK's matrices lie
// column by column, so each routine gets what it sees as the transpose and is asked for the factors
// of that: nothing is transposed in memory. Invariant: a matrix is computed on one thread, so
// results do not depend on how many there are.
#include <lapacke.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/backend/cpu/blas.h"
#include "core/backend/cpu/register.h"
#include "core/backend/cpu/widen.h"
#include "core/base/boundary.h"
#include "core/ops/linalg_attributes.h"
#include "core/primitive/primitive_of.h"

namespace tessera::cpu {
namespace {

constexpr int64_t kGrain = 32768;  // multiply-adds worth a thread

// LAPACK by type. Scratch of a routine is per call: a query says how much it wants.
struct F32 {
  using T = float;
  static constexpr auto potrf = LAPACKE_spotrf_work;
  static constexpr auto gelqf = LAPACKE_sgelqf_work;
  static constexpr auto orglq = LAPACKE_sorglq_work;
  static constexpr auto gesdd = LAPACKE_sgesdd_work;
  static constexpr auto trsm = cblas_strsm;
};
struct F64 {
  using T = double;
  static constexpr auto potrf = LAPACKE_dpotrf_work;
  static constexpr auto gelqf = LAPACKE_dgelqf_work;
  static constexpr auto orglq = LAPACKE_dorglq_work;
  static constexpr auto gesdd = LAPACKE_dgesdd_work;
  static constexpr auto trsm = cblas_dtrsm;
};

// Calls f(F32 or F64) with operands and results in that type; 16-bit floats go through f32.
template <class F>
void by_precision(std::span<const Tensor> in, std::span<const Tensor> out, F f) {
  blas_on_one_thread();
  switch (in[0].dtype()) {
    case kF64: return f(F64(), in, out);
    case kF32: return f(F32(), in, out);
    default:
      through_f32(in, out, in[0].dtype(),
                  [&](auto wide_in, auto wide_out) { f(F32(), wide_in, wide_out); });
  }
}

// A batch of dense matrices.
template <class T>
struct Matrices {
  T* p;
  int64_t rows, columns, count = 1;
  explicit Matrices(const Tensor& t)
      : p(static_cast<T*>(const_cast<void*>(t.raw_values()))),
        rows(t.size(-2)),
        columns(t.size(-1)) {
    for (int d = 0; d + 2 < t.ndim(); ++d) count *= t.shape()[d];
  }
  T* at(int64_t i) const { return p + i * rows * columns; }
};

// "matrix [1, 2] of f64[2, 3, 4, 4]", or "f64[4, 4]" where there is one.
std::string name_matrix(const Tensor& t, int64_t i) {
  std::string all = std::string(name_of(t.dtype())) + to_string(t.shape());
  if (t.ndim() == 2) return all;
  Dims at = Dims::filled(t.ndim() - 2, 0);
  for (int d = t.ndim() - 3; d >= 0; --d) at[d] = i % t.shape()[d], i /= t.shape()[d];
  return fmt::format("matrix {} of {}", to_string(at), all);
}

// Calls body(i), which returns 0 or the number of the pivot that failed, for each matrix of a
// batch; returns the first that failed, and its pivot from 0, or -1.
template <class F>
std::pair<int64_t, int64_t> each_matrix(BoundaryName threads, int64_t count, int64_t work, F body) {
  std::vector<int64_t> failed(size_t(count), 0);
  parallel_for(threads, count, std::max<int64_t>(1, kGrain / std::max<int64_t>(work, 1)),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) failed[size_t(i)] = body(i);
               });
  for (int64_t i = 0; i < count; ++i)
    if (failed[size_t(i)]) return {i, failed[size_t(i)] - 1};
  return {-1, -1};
}

// Throws for what LAPACK calls an illegal argument, which is a fault of ours.
void check_info(const char* routine, lapack_int info) {
  TESSERA_ASSERT(info >= 0, "LAPACK {}: argument {} is illegal", routine, -info);
}

// ---- cholesky

void plan_cholesky(const Primitive&, std::span<const Tensor>, std::span<Meta>, Plan& plan) {
  plan.dense_in = 1, plan.in_place = true;
}

// The lower triangle of (a + a')/2, above it zeros. l may be a.
template <class T>
void symmetric_lower(const T* a, T* l, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j <= i; ++j) {
      T mean = (a[i * n + j] + a[j * n + i]) / 2;
      if (j < i) l[j * n + i] = 0;
      l[i * n + j] = mean;
    }
}

void run_cholesky(const Primitive&, std::span<const Tensor> in, std::span<const Tensor> out,
                  Workspace, const Stream&) {
  by_precision(in, out, [&](auto lib, auto from, auto to) {
    using L = decltype(lib);
    using T = typename L::T;
    Matrices<T> a(from[0]), l(to[0]);
    int64_t n = a.rows;
    auto [matrix, pivot] =
        each_matrix("cholesky.threads", a.count, n * n * n / 3, [&](int64_t i) -> int64_t {
          T* x = l.at(i);
          symmetric_lower(a.at(i), x, n);
          // What is lower here is upper there.
          lapack_int info = L::potrf(LAPACK_COL_MAJOR, 'U', lapack_int(n), x,
                                     lapack_int(std::max<int64_t>(n, 1)));
          check_info("potrf", info);
          for (int64_t d = 0; d < n && info == 0; ++d)
            if (!(x[d * n + d] > 0)) info = lapack_int(d + 1);  // NaN
          return info;
        });
    TESSERA_CHECK(matrix < 0,
                  "cholesky: {} is not positive-definite: the leading minor of order {} is not "
                  "positive (pivot {})",
                  name_matrix(in[0], matrix), pivot + 1, pivot);
  });
}

// ---- solve_triangular

// True when rows, or columns, of each matrix are dense.
bool suits_blas(const Tensor& a) {
  int64_t n = a.size(-1), row = a.strides()[a.ndim() - 2], column = a.strides()[a.ndim() - 1];
  return n <= 1 || (column == 1 && row >= n) || (row == 1 && column >= n);
}

void plan_solve_triangular(const Primitive&, std::span<const Tensor> in, std::span<Meta>,
                           Plan& plan) {
  plan.dense_in = suits_blas(in[0]) ? 2 : 3;
}

int64_t offset_of_matrix(const Tensor& t, int64_t i) {
  int64_t offset = 0;
  for (int d = t.ndim() - 3; d >= 0; --d)
    offset += i % t.shape()[d] * t.strides()[d], i /= t.shape()[d];
  return offset;
}

void run_solve_triangular(const Primitive& p, std::span<const Tensor> in,
                          std::span<const Tensor> out, Workspace, const Stream&) {
  const auto& o = attributes_of<SolveTriangularAttributes>(p);
  by_precision(in, out, [&](auto lib, auto from, auto to) {
    using L = decltype(lib);
    using T = typename L::T;
    const Tensor& a = from[0];
    Matrices<T> b(from[1]), x(to[0]);
    const T* values = a.template values<T>();
    const int64_t n = a.size(-1), row = a.strides()[a.ndim() - 2],
                  column = a.strides()[a.ndim() - 1];
    const bool by_columns = n > 1 && column != 1;
    auto triangle = o.upper != by_columns ? CblasUpper : CblasLower;
    auto [matrix, pivot] = each_matrix(
        "solve_triangular.threads", x.count, n * x.rows * x.columns, [&](int64_t i) -> int64_t {
          const T* m = values + offset_of_matrix(a, i);
          for (int64_t d = 0; d < n && !o.unitriangular; ++d)
            if (m[d * (row + column)] == 0) return d + 1;
          std::memcpy(x.at(i), b.at(i), size_t(x.rows * x.columns) * sizeof(T));
          if (n == 0 || x.rows * x.columns == 0) return 0;
          L::trsm(CblasRowMajor, o.left ? CblasLeft : CblasRight, triangle,
                  by_columns ? CblasTrans : CblasNoTrans,
                  o.unitriangular ? CblasUnit : CblasNonUnit, blasint(x.rows), blasint(x.columns),
                  T(1), m, blasint(std::max({row, column, n})), x.at(i), blasint(x.columns));
          return 0;
        });
    TESSERA_CHECK(matrix < 0,
                  "solve_triangular: {} is singular: pivot {}, an element of its diagonal, is 0",
                  name_matrix(in[0], matrix), pivot);
  });
}

// ---- qr, svd

void plan_dense(const Primitive&, std::span<const Tensor>, std::span<Meta>, Plan& plan) {
  plan.dense_in = 1;
}

// LAPACK sees a' and factors it as l q', which is a = q l'. Householder vectors and so signs are
// those of geqrf on a.
void run_qr(const Primitive&, std::span<const Tensor> in, std::span<const Tensor> out, Workspace,
            const Stream&) {
  by_precision(in, out, [&](auto lib, auto from, auto to) {
    using L = decltype(lib);
    using T = typename L::T;
    Matrices<T> a(from[0]), q(to[0]), r(to[1]);
    const int64_t m = a.rows, n = a.columns, k = std::min(m, n);
    if (k == 0) return;
    constexpr int64_t kBlock = 64;  // LAPACK's own are up to this
    each_matrix("qr.threads", a.count, 2 * m * n * k, [&](int64_t i) -> int64_t {
      const lapack_int M = lapack_int(m), N = lapack_int(n), K = lapack_int(k);
      std::vector<T> work(size_t(std::max(k, n) * kBlock)), tau(static_cast<size_t>(k)),
          factors(a.at(i), a.at(i) + m * n);
      const lapack_int size = lapack_int(work.size());
      check_info("gelqf", L::gelqf(LAPACK_COL_MAJOR, N, M, factors.data(), N, tau.data(),
                                   work.data(), size));
      T *qi = q.at(i), *ri = r.at(i);
      for (int64_t row = 0; row < k; ++row)
        for (int64_t c = 0; c < n; ++c)
          ri[row * n + c] = c < row ? T(0) : factors[size_t(row * n + c)];
      for (int64_t row = 0; row < m; ++row) std::copy_n(factors.data() + row * n, k, qi + row * k);
      check_info("orglq",
                 L::orglq(LAPACK_COL_MAJOR, K, M, K, qi, K, tau.data(), work.data(), size));
      return 0;
    });
  });
}

// LAPACK sees a' and factors it as v s u', which lies in memory as vh and u.
void run_svd(const Primitive&, std::span<const Tensor> in, std::span<const Tensor> out, Workspace,
             const Stream&) {
  by_precision(in, out, [&](auto lib, auto from, auto to) {
    using L = decltype(lib);
    using T = typename L::T;
    Matrices<T> a(from[0]), u(to[0]), vh(to[2]);
    T* s = to[1].template data<T>();
    const int64_t m = a.rows, n = a.columns, k = std::min(m, n);
    if (k == 0) return;
    const lapack_int M = lapack_int(m), N = lapack_int(n), K = lapack_int(k);
    auto failed = each_matrix("svd.threads", a.count, 8 * m * n * k, [&](int64_t i) -> int64_t {
      std::vector<T> x(a.at(i), a.at(i) + m * n);
      for (T v : x)
        if (!std::isfinite(v)) return 1;  // LAPACK may loop forever
      std::vector<lapack_int> integers(size_t(8 * k));
      T wanted = 0;
      auto factor = [&](T* work, lapack_int size) {
        lapack_int info = L::gesdd(LAPACK_COL_MAJOR, 'S', N, M, x.data(), N, s + i * k, vh.at(i), N,
                                   u.at(i), K, work, size, integers.data());
        check_info("gesdd", info);
        return info;
      };
      factor(&wanted, -1);
      std::vector<T> work(size_t(wanted) + 1);
      return factor(work.data(), lapack_int(work.size())) ? 2 : 0;
    });
    TESSERA_CHECK(failed.first < 0 || failed.second != 0, "svd: {} holds NaN or infinity",
                  name_matrix(in[0], failed.first));
    TESSERA_CHECK(failed.first < 0, "svd: {}: LAPACK's iteration did not converge",
                  name_matrix(in[0], failed.first));
  });
}

}  // namespace

void register_linalg(KernelTable& t) {
  t.add(DeviceKind::kCPU, "cholesky", {plan_cholesky, run_cholesky});
  t.add(DeviceKind::kCPU, "solve_triangular", {plan_solve_triangular, run_solve_triangular});
  t.add(DeviceKind::kCPU, "qr", {plan_dense, run_qr});
  t.add(DeviceKind::kCPU, "svd", {plan_dense, run_svd});
}

}  // namespace tessera::cpu
