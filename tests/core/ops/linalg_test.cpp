// Linear algebra where the sweeps and golden cases do not reach: what errors name, layouts that
// need no copy, sizes beyond LAPACK's blocks, threads, and einsum's refusals.
#include "core/ops/linalg.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <limits>

#include "core/autograd/autograd.h"
#include "core/base/parallel.h"
#include "core/ops/contract.h"
#include "core/ops/create.h"
#include "core/ops/einsum.h"
#include "core/ops/pointwise.h"
#include "core/ops/samples.h"
#include "core/ops/views.h"

namespace tessera {
namespace {

double difference(const Tensor& a, const Tensor& b) {
  EXPECT_EQ(describe(a), describe(b));
  return amax(abs(cast(a, kF64) - cast(b, kF64))).item<double>();
}

template <class E = UserError>
void expect_error(const std::function<void()>& call, std::initializer_list<const char*> parts) {
  try {
    call();
    ADD_FAILURE() << "nothing thrown";
  } catch (const E& e) {
    for (const char* part : parts)
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what() << "\n" << part;
  }
}

Tensor identity(int64_t n) { return eye(n, n, {.dtype = kF64}); }
Tensor mirrored(const Tensor& x) { return transpose(x, -2, -1); }
Tensor positive(const Shape& s, uint64_t key) {
  Tensor x = sample_values(s, -1, 1, key);
  return matmul(x, mirrored(x)) + identity(s.back());
}

TEST(Linalg, FactorsOfLargeMatricesMultiplyToThem) {
  for (DType t : {kF64, kF32}) {
    double tolerance = t == kF64 ? 1e-10 : 2e-3;  // elements are up to 130
    Tensor a = cast(positive({2, 391, 391}, 1), t), l = linalg::cholesky(a);
    EXPECT_LT(difference(matmul(l, mirrored(l)), a), tolerance);
    EXPECT_EQ(difference(tril(l), l), 0);
    for (const Shape& s : {Shape{2, 311, 150}, Shape{150, 311}}) {
      Tensor b = cast(sample_values(s, -1, 1, 2), t);
      auto [q, r] = linalg::qr(b);
      EXPECT_LT(difference(matmul(q, r), b), tolerance);
      EXPECT_LT(difference(matmul(mirrored(q), q),
                           expand(cast(identity(150), t),
                                  s.size() == 3 ? Shape{2, 150, 150} : Shape{150, 150})),
                1e-3 * tolerance + (t == kF32 ? 1e-5 : 0));
      auto [u, d, vh] = linalg::svd(b);
      EXPECT_LT(difference(matmul(u * unsqueeze(d, -2), vh), b), tolerance);
    }
  }
}

TEST(Linalg, ResultsDoNotDependOnThreads) {
  Tensor a = positive({9, 40, 40}, 1), b = sample_values({9, 40, 30}, -1, 1, 2);
  auto all = [&] {
    auto [q, r] = linalg::qr(b);
    Tensor parts[] = {reshape(linalg::cholesky(a), {-1}),
                      reshape(linalg::solve_triangular(a, b, {.upper = true}), {-1}),
                      reshape(q, {-1}), reshape(r, {-1}), reshape(linalg::svdvals(b), {-1})};
    return cat(parts);
  };
  const int before = num_threads();
  set_num_threads(1);
  Tensor one = all();
  set_num_threads(3);
  Tensor three = all();
  set_num_threads(before);
  EXPECT_EQ(std::memcmp(one.raw(), three.raw(), one.nbytes()), 0);
}

// The view a' with the other triangle, expanded batches, and a dense copy are one system.
TEST(Linalg, TriangularSystemsTakeTransposedAndExpandedViews) {
  Tensor a = sample_values({4, 4}, -1, 1, 1) + identity(4) * 3.0,
         b = sample_values({3, 4, 2}, -1, 1, 2);
  for (bool upper : {false, true}) {
    Tensor want = linalg::solve_triangular(clone(mirrored(a)), clone(b), {.upper = upper});
    EXPECT_EQ(difference(linalg::solve_triangular(mirrored(a), b, {.upper = upper}), want), 0);
    Tensor triangle = upper ? triu(mirrored(a)) : tril(mirrored(a));
    EXPECT_LT(difference(matmul(triangle, want), b), 1e-13);
    Tensor right = linalg::solve_triangular(a, mirrored(b), {.upper = !upper, .left = false});
    EXPECT_LT(difference(mirrored(right), want), 1e-13);
  }
}

TEST(Linalg, OneTriangleIsRead) {
  double nan = std::numeric_limits<double>::quiet_NaN();
  Tensor a = sample_values({3, 3}, 1, 2, 1), b = sample_values({3, 2}, -1, 1, 2);
  Tensor holes = tril(a) + triu(full({3, 3}, nan, {.dtype = kF64}), 1);
  EXPECT_EQ(difference(linalg::solve_triangular(holes, b, {.upper = false}),
                       linalg::solve_triangular(tril(a), b, {.upper = false})),
            0);
  Tensor strict = where(ne(identity(3), 0), full({3, 3}, 0.0, {.dtype = kF64}), a);
  EXPECT_EQ(difference(linalg::solve_triangular(strict, b, {.upper = true, .unitriangular = true}),
                       linalg::solve_triangular(strict + identity(3), b, {.upper = true})),
            0);
}

TEST(Linalg, TheSymmetricPartIsFactored) {
  Tensor a = positive({3, 3}, 1), skew = sample_values({3, 3}, -1, 1, 2);
  skew = skew - mirrored(skew);
  EXPECT_LT(difference(linalg::cholesky(a + skew), linalg::cholesky(a)), 1e-14);
}

TEST(Linalg, EmptyBatchesAndMatrices) {
  for (const Shape& s : {Shape{0, 3, 3}, Shape{2, 0, 0}, Shape{0, 0}}) {
    Tensor a = zeros(s, {.dtype = kF64});
    EXPECT_EQ(linalg::cholesky(a).shape(), s);
    EXPECT_EQ(linalg::solve_triangular(a, a, {.upper = true}).shape(), s);
    EXPECT_EQ(linalg::qr(a).r.shape(), s);
    EXPECT_EQ(linalg::svd(a).vh.shape(), s);
  }
}

TEST(Linalg, ErrorsNameTheMatrixAndThePivot) {
  Tensor a = positive({2, 3, 4, 4}, 1);
  a.data<double>()[(1 * 3 + 2) * 16 + 2 * 4 + 2] = -5;  // matrix [1, 2], element [2, 2]
  expect_error([&] { linalg::cholesky(a); }, {"cholesky", "matrix [1, 2] of f64[2, 3, 4, 4]",
                                              "not positive-definite", "order 3", "pivot 2"});
  expect_error([&] { linalg::cholesky(cast(a, kBF16)); }, {"matrix [1, 2] of bf16[2, 3, 4, 4]"});
  Tensor nan = clone(positive({2, 2}, 1));
  nan.data<double>()[0] = std::numeric_limits<double>::quiet_NaN();
  expect_error([&] { linalg::cholesky(nan); }, {"f64[2, 2] is not positive-definite", "pivot 0"});
  expect_error([&] { linalg::svd(nan); }, {"svd: f64[2, 2] holds NaN"});

  Tensor t = sample_values({2, 3, 3}, 1, 2, 1), b = sample_values({2, 3, 2}, 1, 2, 2);
  t.data<double>()[9 + 4] = 0;
  expect_error([&] { linalg::solve_triangular(t, b, {.upper = true}); },
               {"solve_triangular", "matrix [1] of f64[2, 3, 3]", "singular", "pivot 1"});
  linalg::solve_triangular(t, b, {.upper = true, .unitriangular = true});  // not read

  // The factors exist, their derivative does not.
  Tensor zero = zeros({3, 2}, {.dtype = kF64}).requires_grad_();
  expect_error([&] { sum(linalg::qr(zero).r).backward(); }, {"singular", "pivot 0"});
}

TEST(Linalg, ShapesThatAreNoMatricesAreNamed) {
  Tensor v = zeros({3}, {.dtype = kF64}), m = zeros({2, 3}, {.dtype = kF64}), sq = identity(2);
  expect_error<ShapeError>([&] { linalg::cholesky(m); }, {"square", "f64[2, 3]"});
  expect_error<ShapeError>([&] { linalg::qr(v); }, {"qr", "f64[3]"});
  expect_error<ShapeError>([&] { linalg::cholesky(cast(sq, kI64)); }, {"floats", "i64[2, 2]"});
  expect_error<ShapeError>([&] { linalg::solve_triangular(sq, v, {.upper = true}); }, {"f64[3]"});
  expect_error<ShapeError>([&] { linalg::solve_triangular(sq, m, {.upper = true, .left = false}); },
                           {"[.., K, N] (left = false)"});
  expect_error<ShapeError>([&] { linalg::solve_triangular(sq, cast(sq, kF32), {.upper = true}); },
                           {"f64[2, 2], f32[2, 2]"});
  expect_error([&] { linalg::matrix_norm(m, 3); }, {"no order 3"});
  expect_error<ShapeError>([&] { linalg::matrix_norm(m, 1, {0, 0}); }, {"no matrix"});
}

TEST(Einsum, ErrorsSayWhatIsWrong) {
  Tensor m = sample_values({2, 3}, -1, 1, 1);
  expect_error([&] { einsum("ij,jk->ik", m); }, {"names 2 operands, got 1"});
  expect_error([&] { einsum("i1->i", m); }, {"'1'", "no letter"});
  expect_error([&] { einsum("i..->i", m); }, {"'.'", "no letter"});
  expect_error([&] { einsum("...i...->i", m); }, {"\"...\" twice"});
  expect_error([&] { einsum("ij->ik", m); }, {"'k' is in no operand"});
  expect_error([&] { einsum("ij->ii", m); }, {"repeats 'i' in the result"});
  expect_error([&] { einsum("ij->i->j", m); }, {"'-'"});
  expect_error<ShapeError>([&] { einsum("ijk->i", m); }, {"\"ijk\" names 3 dims", "f64[2, 3]"});
  expect_error<ShapeError>([&] { einsum("ijk...->i", m); }, {"at least 3 dims"});
  expect_error<ShapeError>([&] { einsum("ij,ik->jk", m, transpose(m, 0, 1)); },
                           {"'i' has extent 3", "operand 1", "2 in f64[2, 3]", "operand 0"});
  expect_error<ShapeError>([&] { einsum("...,...->...", m, transpose(m, 0, 1)); },
                           {"dim -2 of \"...\""});
}

// Operands of none, one and two dims, as written with other ops.
TEST(Einsum, FollowsItsDefinition) {
  Tensor a = sample_values({2, 3}, -1, 1, 1), b = sample_values({3, 4}, -1, 1, 2),
         c = sample_values({4}, -1, 1, 3);
  EXPECT_LT(difference(einsum("ij, jk, k -> i", a, b, c), matmul(matmul(a, b), c)), 1e-14);
  EXPECT_EQ(difference(einsum(" ij ", a), a), 0);
  EXPECT_LT(difference(einsum("ij->", a), sum(a)), 1e-15);
  EXPECT_LT(difference(einsum("...,...", a, a), a * a), 1e-15);
  Tensor scalar = full({}, 2.0, {.dtype = kF64});
  EXPECT_EQ(difference(einsum(",ij->ji", scalar, a), transpose(a, 0, 1) * 2.0), 0);
}

}  // namespace
}  // namespace tessera
