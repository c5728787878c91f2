// Segments and sparse products where the sweeps do not reach: golden cases, sizes beyond one chunk
// of columns, threads, NaN and ties, and what errors name.
#include "core/ops/sparse.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <limits>

#include "core/autograd/autocast.h"
#include "core/autograd/autograd.h"
#include "core/base/parallel.h"
#include "core/ops/contract.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/views.h"
#include "tests/core/ops/golden.h"

namespace tessera {
namespace {

using How = ScatterReduce;

How how_of(const std::string& name) {
  if (name == "sum") return How::kSum;
  if (name == "mean") return How::kMean;
  if (name == "prod") return How::kProd;
  return name == "max" || name == "amax" ? How::kAmax : How::kAmin;
}

Tensor integers(const std::vector<int64_t>& v) {
  return from_values<int64_t>(v, {int64_t(v.size())});
}
std::vector<double> values(const Tensor& t) {
  Tensor d = contiguous(cast(t.detach(), kF64));
  return {d.data<double>(), d.data<double>() + d.numel()};
}

void expect_error(const std::function<void()>& call, std::initializer_list<const char*> parts) {
  try {
    call();
    ADD_FAILURE() << "nothing thrown";
  } catch (const UserError& e) {
    for (const char* part : parts)
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what() << "\n" << part;
  }
}

// A matrix with rows of 0 to 40 edges, every third one empty.
struct Random {
  Csr a;
  Tensor weights;
  int64_t rows, columns;
};
Random random_matrix(int64_t rows, int64_t columns, DType t) {
  std::vector<int64_t> crow{0};
  for (int64_t m = 0; m < rows; ++m) crow.push_back(crow.back() + (m % 3 ? m * 7 % 41 : 0));
  int64_t edges = crow.back();
  return {{integers(crow), sample_integers({edges}, 0, columns, 1)},
          cast(sample_values({edges}, -1, 1, 2), t),
          rows,
          columns};
}
// The same, dense: places named twice are added.
Tensor dense_of(const Random& r) {
  Tensor d = zeros({r.rows, r.columns}, {.dtype = kF64});
  const int64_t *crow = r.a.crow.data<int64_t>(), *col = r.a.col.data<int64_t>();
  std::vector<double> w = values(r.weights);
  for (int64_t m = 0; m < r.rows; ++m)
    for (int64_t e = crow[m]; e < crow[m + 1]; ++e)
      d.data<double>()[m * r.columns + col[e]] += w[size_t(e)];
  return d;
}

double difference(const Tensor& a, const Tensor& b) {
  EXPECT_EQ(a.shape(), b.shape());
  return amax(abs(cast(a, kF64) - cast(b, kF64))).item<double>();
}

}  // namespace

namespace golden {

const Table& sparse_table() {
  static const Table table = {
      {"segment_reduce",
       [](const Case& c) {
         Tensor offsets = c.has("offsets") ? c["offsets"] : offsets_of(c["lengths"]);
         return std::vector<Tensor>{segment_reduce(c["x"], offsets, how_of(c.text("reduce")))};
       }},
      {"spmm_reduce",
       [](const Case& c) {
         return std::vector<Tensor>{
             spmm_reduce({c["crow"], c["col"]}, c["values"], c["dense"], how_of(c.text("reduce")))};
       }},
  };
  return table;
}

TEST(Golden, Sparse) { check_all(sparse_table()); }

}  // namespace golden

namespace {

// Four vectors of columns, one, and single ones, in both widths; gradients against dense products.
TEST(Spmm, EqualsTheDenseProductAndItsGradients) {
  for (DType t : {kF64, kF32})
    for (int64_t k : {1, 5, 83, 200}) {
      Random r = random_matrix(50, 30, t);
      Tensor x = cast(sample_values({30, k}, -1, 1, 3), t).requires_grad_(),
             w = r.weights.requires_grad_();
      Tensor y = spmm_reduce(r.a, w, x), d = dense_of(r), g = sample_values({50, k}, -1, 1, 4);
      double tolerance = t == kF64 ? 1e-13 : 2e-5;
      EXPECT_LT(difference(y, matmul(d, cast(x.detach(), kF64))), tolerance);
      sum(y * cast(g, t)).backward();
      EXPECT_LT(difference(x.grad(), matmul(transpose(d, 0, 1), g)), tolerance);
      Tensor all = matmul(g, transpose(cast(x.detach(), kF64), 0, 1));
      const int64_t *crow = r.a.crow.data<int64_t>(), *col = r.a.col.data<int64_t>();
      std::vector<double> got = values(w.grad());
      for (int64_t m = 0; m < 50; ++m)
        for (int64_t e = crow[m]; e < crow[m + 1]; ++e)
          ASSERT_NEAR(got[size_t(e)], all.data<double>()[m * 30 + col[e]], 20 * tolerance);
    }
}

TEST(Sparse, ResultsDoNotDependOnThreads) {
  Random r = random_matrix(700, 300, kF32);
  Tensor x = cast(sample_values({300, 96}, -1, 1, 3), kF32),
         rows = cast(sample_values({r.a.col.numel(), 8}, -1, 1, 4), kF32);
  auto all = [&] {
    CsrTranspose t = csr_transpose(r.a, 300);
    Tensor parts[] = {reshape(spmm_reduce(r.a, r.weights, x), {-1}),
                      reshape(spmm_reduce(r.a, {}, x, How::kMean), {-1}),
                      reshape(spmm_reduce(r.a, r.weights, x, How::kAmin), {-1}),
                      sddmm(t.transposed, x, cast(sample_values({700, 96}, -1, 1, 5), kF32)),
                      reshape(segment_reduce(rows, r.a.crow, How::kSum), {-1})};
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

TEST(Spmm, TransposingTwiceSortsRows) {
  Random r = random_matrix(200, 30, kF64);
  EXPECT_GT(r.a.col.numel(), 2000);
  CsrTranspose t = csr_transpose(r.a, 30), back = csr_transpose(t.transposed, 200);
  EXPECT_EQ(values(back.transposed.crow), values(r.a.crow));
  Tensor w = index_select(index_select(r.weights, 0, t.order), 0, back.order);
  Random sorted{back.transposed, w, 200, 30};
  EXPECT_LT(difference(dense_of(sorted), dense_of(r)), 1e-14);
  EXPECT_EQ(difference(dense_of({t.transposed, index_select(r.weights, 0, t.order), 30, 200}),
                       transpose(dense_of(r), 0, 1)),
            0);
}

// The first of equal extremes has the gradient; NaN wins and stays; empty rows are 0.
TEST(Spmm, ExtremesOfTiesAndNaN) {
  double nan = std::numeric_limits<double>::quiet_NaN();
  Csr a{integers({0, 2, 2, 5}), integers({0, 1, 0, 2, 1})};
  Tensor x = from_values<double>({1, 1, nan}, {3, 1}).requires_grad_();
  Tensor y = spmm_reduce(a, {}, x, How::kAmax);
  std::vector<double> got = values(y);
  EXPECT_EQ(got[0], 1);
  EXPECT_EQ(got[1], 0);
  EXPECT_TRUE(std::isnan(got[2]));
  sum(narrow(y, 0, 0, 2)).backward();
  EXPECT_EQ(values(x.grad()), (std::vector<double>{1, 0, 0}));
}

TEST(Spmm, MatricesWithoutEdgesOrRows) {
  Tensor x = ones({3, 2}, {.dtype = kF64}).requires_grad_();
  Csr none{integers({0, 0, 0}), empty({0}, kI64)}, no_rows{integers({0}), empty({0}, kI64)};
  for (How how : {How::kSum, How::kMean, How::kAmax, How::kAmin}) {
    Tensor y = spmm_reduce(none, {}, x, how);
    EXPECT_EQ(values(y), std::vector<double>(4, 0.0));
    x.set_grad({});
    sum(y).backward();
    EXPECT_EQ(values(x.grad()), std::vector<double>(6, 0.0));
    EXPECT_EQ(spmm_reduce(no_rows, {}, x, how).shape(), (Shape{0, 2}));
  }
}

TEST(Sparse, ProductsUnderAutocastAreWide) {
  Csr a{integers({0, 1, 2}), integers({0, 2})};
  Tensor x = ones({3, 2}), w = ones({2});
  Autocast scope(kBF16);
  EXPECT_EQ(spmm_reduce(a, w, cast(x, kBF16)).dtype(), kF32);
  EXPECT_EQ(sddmm(a, cast(ones({2, 2}), kBF16), x).dtype(), kF32);
}

TEST(Sparse, ErrorsNameTheEntry) {
  Tensor x = ones({3, 2}, {.dtype = kF64}), w = ones({2}, {.dtype = kF64});
  Csr good{integers({0, 1, 2}), integers({0, 2})};
  expect_error(
      [&] {
        spmm_reduce({integers({0, 1, 2}), integers({0, 3})}, w, x);
      },
      {"spmm: col[1] is 3, outside 3 columns"});
  expect_error(
      [&] {
        spmm_reduce({integers({0, 2, 1, 2}), integers({0, 1})}, w, x);
      },
      {"crow falls from 2 to 1 at 2"});
  expect_error([&] { spmm_reduce({integers({1, 2}), integers({0, 1})}, w, x); }, {"crow[0] is 1"});
  expect_error(
      [&] {
        spmm_reduce({integers({0, 1}), integers({0, 1})}, w, x);
      },
      {"crow[1] is 1", "number of elements, 2"});
  expect_error([&] { spmm_reduce(good, ones({3}, {.dtype = kF64}), x); }, {"do not fit"});
  expect_error([&] { spmm_reduce(good, w, x, How::kProd); }, {"no product"});
  expect_error([&] { sddmm(good, x, x); }, {"sddmm", "do not fit"});
  expect_error(
      [&] {
        segment_reduce(x, integers({0, 2}), How::kSum);
      },
      {"segment_sum: offsets[1] is 2", "number of elements, 3"});
  expect_error([&] { segment_reduce(cast(x, kI64), integers({0, 3}), How::kSum); }, {"floats"});
  expect_error([&] { segment_reduce(x, ones({2}), How::kSum); }, {"offsets are f32", "integers"});
  expect_error([&] { csr_transpose(good, -1); }, {"-1 columns"});
  expect_error([&] { offsets_of(x); }, {"offsets_of"});
}

}  // namespace
}  // namespace tessera
