// Products under PyTorch's names, statistics and rearrangements made of other ops: against sums and
// loops written out, and what they refuse.
#include "core/ops/products.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/autograd/autograd.h"
#include "core/ops/compose.h"
#include "core/ops/create.h"
#include "core/ops/fused.h"
#include "core/ops/indexing.h"
#include "core/ops/layout.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/statistics.h"
#include "core/ops/views.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

Tensor draw(const Shape& shape) { return randn(shape, {.dtype = kF64}); }
void expect_near(const Tensor& got, const Tensor& want) {
  ASSERT_EQ(got.shape(), want.shape());
  EXPECT_TRUE(allclose(got, want, 1e-12, 1e-12)) << got << " instead of " << want;
}
void expect_equal(const Tensor& got, const Tensor& want) {
  ASSERT_EQ(got.shape(), want.shape());
  ASSERT_EQ(got.dtype(), want.dtype());
  EXPECT_TRUE(equal(got, want)) << got << " instead of " << want;
}
double at(const Tensor& t, std::initializer_list<TensorIndex> place) {
  return t.index(place).item<double>();
}

TEST(Products, AreMatmulsOfGivenDims) {
  const Tensor a = draw({3, 4}), b = draw({4, 5}), v = draw({4}), x = draw({5}),
               p = draw({2, 3, 4}), q = draw({2, 4, 5});
  expect_near(mm(a, b), matmul(a, b));
  expect_near(mv(a, v), matmul(a, v));
  expect_near(bmm(p, q), matmul(p, q));
  expect_near(addmm(x, a, b, 2, 0.5), x * 2.0 + matmul(a, b) * 0.5);
  expect_near(addmm(x * NAN, a, b, 0), matmul(a, b));
  expect_near(trace(draw({3, 3}) * 0.0 + eye(3, {.dtype = kF64})), tensor(3., {.dtype = kF64}));
  expect_contains(error_of([&] { mm(p, q); }), "operands of 2 and 2 dims");
  expect_contains(error_of([&] { bmm(p, draw({1, 4, 5})); }), "batches");
  expect_contains(error_of([&] { mv(a, b); }), "mv:");
  expect_contains(error_of([&] { addmm(draw({7, 3, 5}), a, b); }), "addmm");
  expect_contains(error_of([&] { trace(v); }), "no matrix");
}

TEST(Products, Tensordot) {
  const Tensor a = draw({2, 3, 4}), b = draw({3, 4, 5});
  Tensor want = zeros({2, 5}, {.dtype = kF64});
  for (int64_t i = 0; i < 3; ++i)
    for (int64_t j = 0; j < 4; ++j) want += outer(a.index({Slice(), i, j}), b.index({i, j}));
  expect_near(tensordot(a, b), want);
  expect_near(tensordot(a, b.permute({1, 2, 0}), {1, 2}, {2, 0}), want);
  expect_near(tensordot(a, b, 0).index({1, 2, 3}), b * at(a, {1, 2, 3}));
  expect_contains(error_of([&] { tensordot(a, b, 1); }), "other extents");
  expect_contains(error_of([&] { tensordot(a, b, 4); }), "4 dims");
}

TEST(Products, Kron) {
  const Tensor a = draw({2, 3}), b = draw({4, 2}), k = kron(a, b);
  ASSERT_EQ(k.shape(), (Shape{8, 6}));
  for (int64_t i = 0; i < 8; ++i)
    for (int64_t j = 0; j < 6; ++j)
      EXPECT_EQ(at(k, {i, j}), at(a, {i / 4, j / 2}) * at(b, {i % 4, j % 2}));
  expect_near(kron(b, draw({3}) * 0.0 + 1.0), repeat_interleave(b, 3, 1));
}

TEST(Products, BilinearAndDistances) {
  const Tensor a = draw({4, 3}), b = draw({4, 2}), w = draw({5, 3, 2}), bias = draw({5});
  const Tensor y = bilinear(a, b, w, bias);
  for (int64_t n = 0; n < 4; ++n)
    for (int64_t o = 0; o < 5; ++o)
      EXPECT_NEAR(at(y, {n, o}), at(sum(outer(a[n], b[n]) * w[o]) + bias[o], {}), 1e-12);
  const Tensor c = draw({6, 3}), d = cdist(a, c), d1 = cdist(a, c, 1);
  ASSERT_EQ(d.shape(), (Shape{4, 6}));
  for (int64_t i = 0; i < 4; ++i)
    for (int64_t j = 0; j < 6; ++j) {
      EXPECT_NEAR(at(d, {i, j}), std::sqrt(sum(square(a[i] - c[j])).item<double>()), 1e-12);
      EXPECT_NEAR(at(d1, {i, j}), sum(abs(a[i] - c[j])).item<double>(), 1e-12);
    }
  expect_contains(error_of([&] { cdist(a, b); }), "rows of one length");
}

TEST(Statistics, Pairs) {
  const Tensor x = draw({3, 4});
  expect_near(var_mean(x, 1).first, var(x, 1));
  expect_near(var_mean(x, 1).second, mean(x, 1));
  expect_near(std_mean(x, 1, 0, true).first, stddev(x, 1, 0, true));
  expect_near(std_mean(x, 1, 0, true).second, mean(x, 1, true));
  expect_near(aminmax(x, 0).first, amin(x, 0));
  expect_near(aminmax(x).second, amax(x));
}

TEST(Statistics, QuantilesLieOnLinesBetweenElements) {
  const Tensor x = tensor({{4., 1., 3., 2.}, {10., 30., 20., 40.}});
  expect_equal(quantile(x, 0.5, 1), tensor({2.5, 25.}));
  expect_equal(quantile(x, 0, 1, true), tensor({{1.}, {10.}}));
  expect_equal(quantile(x, 1, 0), tensor({10., 30., 20., 40.}));
  expect_equal(quantile(x, 0.25, 0), tensor({5.5, 8.25, 7.25, 11.5}));
  EXPECT_EQ(quantile(x, 0.5).item<float>(), 7);
  const Tensor gap = tensor({{1., NAN, 2.}, {3., 1., 2.}});
  expect_equal(isnan(quantile(gap, 0.5, 1)), tensor({true, false}));
  Tensor w = tensor({3., 1., 2.}).requires_grad_();
  quantile(w, 0.75).backward();
  expect_equal(w.grad(), tensor({0.5, 0., 0.5}));
  expect_contains(error_of([&] { quantile(x, 1.5); }), "1.5");
  expect_contains(error_of([] { quantile(arange(3), 0.5); }), "floats");
}

TEST(Statistics, Covariance) {
  const Tensor x = draw({3, 20}), c = cov(x), r = corrcoef(x);
  for (int64_t i = 0; i < 3; ++i)
    for (int64_t j = 0; j < 3; ++j) {
      const double want = sum((x[i] - mean(x[i])) * (x[j] - mean(x[j]))).item<double>() / 19;
      EXPECT_NEAR(at(c, {i, j}), want, 1e-12);
      EXPECT_NEAR(at(r, {i, j}), want / (stddev(x[i]).item<double>() * stddev(x[j]).item<double>()),
                  1e-12);
    }
  expect_near(cov(x[0]), var(x[0]));
  expect_near(corrcoef(x[0]), tensor(1., {.dtype = kF64}));
  expect_near(cov(x, 0), c * (19. / 20));
}

TEST(Statistics, Histogram) {
  const Tensor x = tensor({0., 0.5, 1., 1.5, 2., 2.5, 3., 4., -1., NAN});
  expect_equal(histc(x, 4, 0, 4), tensor({2., 2., 2., 2.}));
  expect_equal(histc(tensor({1., 2., 2., 3.}), 2), tensor({1., 3.}));
  expect_equal(histc(tensor({2., 2.}), 2), tensor({0., 2.}));
  expect_contains(error_of([&] { histc(x, 4); }), "finite range");
  expect_contains(error_of([&] { histc(x, 0, 0, 1); }), "0 bins");
}

TEST(Statistics, RunsMembersAndBuckets) {
  const Tensor x = from_values<int64_t>({3, 3, 1, 1, 1, 3}, {2, 3});
  auto [values, inverse, counts] = unique_consecutive(x);
  expect_equal(values, tensor({3, 1, 3}));
  expect_equal(inverse, tensor({{0, 0, 1}, {1, 1, 2}}));
  expect_equal(counts, tensor({2, 3, 1}));
  EXPECT_EQ(unique_consecutive(zeros(0)).counts.shape(), Shape{0});
  expect_equal(isin(x, tensor({5, 1})), tensor({{false, false, true}, {true, true, false}}));
  expect_equal(isin(tensor({NAN, 1., 7.}), tensor({1., NAN})), tensor({false, true, false}));
  expect_equal(isin(x, from_values<int64_t>(std::initializer_list<int64_t>{}, {0})),
               tensor({{false, false, false}, {false, false, false}}));
  const Tensor edges = tensor({1, 3, 5});
  expect_equal(bucketize(tensor({0, 1, 4, 9}), edges), tensor({0, 0, 2, 3}));
  expect_equal(bucketize(tensor({0, 1, 4, 9}), edges, true), tensor({0, 1, 2, 3}));
}

TEST(Statistics, AreasAndNorms) {
  expect_equal(trapezoid(tensor({{1., 2., 4.}, {0., 0., 2.}})), tensor({4.5, 1.}));
  expect_equal(trapezoid(tensor({1., 3.}), 0.5), tensor(1.));
  expect_equal(trapezoid(tensor({7.})), tensor(0.));
  const Tensor x = draw({3, 4}) * tensor({{0.01}, {1.}, {100.}}, {.dtype = kF64});
  const Tensor norms = norm(renorm(x, 2, 0, 1.5), 2, 1);
  EXPECT_NEAR(at(norms, {0}), at(norm(x, 2, 1), {0}), 1e-12);
  EXPECT_NEAR(at(norms, {2}), 1.5, 1e-6);
}

TEST(Layout, Stacks) {
  const Tensor a = tensor({1, 2}), b = tensor({3, 4}), m = tensor({{5, 6}, {7, 8}});
  expect_equal(vstack({a, m}), tensor({{1, 2}, {5, 6}, {7, 8}}));
  expect_equal(hstack({a, b}), tensor({1, 2, 3, 4}));
  expect_equal(hstack({m, m}), tensor({{5, 6, 5, 6}, {7, 8, 7, 8}}));
  expect_equal(cat({m, m}, 1), hstack({m, m}));
  expect_equal(stack({a, b}), tensor({{1, 2}, {3, 4}}));
  expect_equal(stack({a, b}, 1), tensor({{1, 3}, {2, 4}}));
  const Tensor blocks[] = {m, a};
  expect_equal(block_diag(blocks), tensor({{5, 6, 0, 0}, {7, 8, 0, 0}, {0, 0, 1, 2}}));
  expect_equal(cartesian_prod(a, b), tensor({{1, 3}, {1, 4}, {2, 3}, {2, 4}}));
}

TEST(Layout, Turns) {
  const Tensor m = tensor({{1, 2, 3}, {4, 5, 6}});
  expect_equal(rot90(m), tensor({{3, 6}, {2, 5}, {1, 4}}));
  expect_equal(rot90(m, 2), tensor({{6, 5, 4}, {3, 2, 1}}));
  expect_equal(rot90(m, -1), tensor({{4, 1}, {5, 2}, {6, 3}}));
  expect_equal(rot90(rot90(m, 3)), m);
  expect_equal(rot90(m, 1, {1, 0}), rot90(m, 3));
}

TEST(Layout, PixelsShuffleThereAndBack) {
  const Tensor x = reshape(arange(2 * 8 * 3 * 2), {2, 8, 3, 2}), y = pixel_shuffle(x, 2);
  ASSERT_EQ(y.shape(), (Shape{2, 2, 6, 4}));
  for (int64_t c = 0; c < 2; ++c)
    for (int64_t i = 0; i < 6; ++i)
      for (int64_t j = 0; j < 4; ++j)
        EXPECT_EQ(y.index({1, c, i, j}).item<int64_t>(),
                  x.index({1, c * 4 + i % 2 * 2 + j % 2, i / 2, j / 2}).item<int64_t>());
  expect_equal(pixel_unshuffle(y, 2), x);
  expect_contains(error_of([&] { pixel_shuffle(x, 3); }), "C r r");
}

TEST(Layout, Diagonals) {
  const Tensor v = tensor({{1., 2.}, {3., NAN}});
  expect_equal(nan_to_num(diag_embed(v), 9),
               stack({tensor({{1., 0.}, {0., 2.}}), tensor({{3., 0.}, {0., 9.}})}));
  expect_equal(diag_embed(v[0], 1), tensor({{0., 1., 0.}, {0., 0., 2.}, {0., 0., 0.}}));
  expect_equal(diag_embed(v[0], -1), tensor({{0., 0., 0.}, {1., 0., 0.}, {0., 2., 0.}}));
  expect_equal(tril_indices(2, 3), tensor({{0, 1, 1}, {0, 0, 1}}));
  expect_equal(triu_indices(2, 2, 1), tensor({{0}, {1}}));
}

TEST(Layout, SplitsOfOneSizeOrOfThese) {
  const Tensor x = arange(5);
  const Tensors pieces = split(x, 2);
  ASSERT_EQ(pieces.size(), 3u);
  expect_equal(pieces[2], tensor({4}));
  EXPECT_EQ(split(x, {5}).size(), 1u);  // a list is of sizes, also one of one
  EXPECT_EQ(split(x, {2, 3})[1].numel(), 3);
  expect_contains(error_of([&] { split(x, 0); }), "pieces of 0");
}

TEST(Indexing, ScattersAndTakes) {
  const Tensor x = tensor({{1, 2}, {3, 4}}), mask = tensor({{true, false}, {true, true}});
  expect_equal(masked_scatter(x, mask, tensor({7, 8, 9, 10})), tensor({{7, 2}, {8, 9}}));
  expect_equal(take(x, tensor({{3, -4}})), tensor({{4, 1}}));
  expect_equal(select_scatter(x, tensor({8, 9}), 1, 0), tensor({{8, 2}, {9, 4}}));
  expect_equal(select_scatter(x, tensor({8, 9}), 0, -1), tensor({{1, 2}, {8, 9}}));
  expect_contains(error_of([&] { masked_scatter(x, mask, tensor({7, 8})); }), "2");
  const Tensor none = zeros({0}, {.dtype = kI64});
  expect_equal(masked_scatter(x, zeros({2, 2}, {.dtype = kBool}), none), x);
  expect_contains(error_of([&] { masked_scatter(x, mask, none); }), "source i64[0] cpu is empty");
  expect_contains(error_of([&] { masked_scatter(x, mask, tensor({7.5})); }), "of its dtype");
  expect_contains(error_of([&] { take(x, tensor({4})); }), "4");
}

TEST(Compose, Powers) {
  expect_equal(vander(tensor({1, 2, 3})), tensor({{1, 1, 1}, {4, 2, 1}, {9, 3, 1}}));
  expect_equal(vander(tensor({2, 3}), 4, true), tensor({{1, 2, 4, 8}, {1, 3, 9, 27}}));
  EXPECT_EQ(float_power(tensor({2, 3}), 2).dtype(), kF64);
  EXPECT_TRUE(
      allclose(float_power(tensor({2, 3}), tensor({-1, 2})), tensor({0.5, 9.}, {.dtype = kF64})));
  expect_equal(clip(tensor({-1., 0.5, 2.}), 0, 1), tensor({0., 0.5, 1.}));
  const Tensor x = randn({3, 4});
  expect_equal(softmin(x, 1), softmax(-x, 1));
}

TEST(Create, FromNumbers) {
  EXPECT_EQ(tensor({1., 2.}).dtype(), kF32);
  EXPECT_EQ(tensor({1, 2}).dtype(), kI64);
  EXPECT_EQ(tensor({true}).dtype(), kBool);
  EXPECT_EQ(tensor({1, 2.5}).dtype(), kF32);
  EXPECT_EQ(tensor({1., 2.}, {.dtype = kF64}).dtype(), kF64);
  expect_equal(tensor({{1, 2}, {3, 4}}), from_values<int64_t>({1, 2, 3, 4}, {2, 2}));
  EXPECT_EQ(tensor(2.5).shape(), Shape{});
  EXPECT_EQ(tensor({{{1}, {2}}}).shape(), (Shape{1, 2, 1}));
  EXPECT_EQ(tensor({}).shape(), Shape{0});
  EXPECT_EQ(scalar_tensor(2.5).item<double>(), 2.5);
  EXPECT_EQ(scalar_tensor(7).dtype(), kI64);
  expect_equal(arange(3), tensor({0, 1, 2}));
  expect_equal(arange(1.5), tensor({0., 1.}));
  expect_equal(eye(2), tensor({{1., 0.}, {0., 1.}}));
  expect_contains(error_of([] {
                    tensor({{1, 2}, {3}});
                  }),
                  "numbers of shape [1] beside some of [2]");
  expect_contains(error_of([] { tensor({300}, {.dtype = kU8}); }), "300");
}

TEST(Create, OnMemoryOfTheCaller) {
  float memory[] = {1, 2, 3, 4};
  const Tensor t = from_blob(memory, {2, 2});
  expect_equal(t, tensor({{1., 2.}, {3., 4.}}));
  t[1].fill_(7);
  EXPECT_EQ(memory[3], 7);
  EXPECT_EQ(from_blob(nullptr, 0).numel(), 0);
  expect_contains(error_of([] { from_blob(nullptr, {2}); }), "memory of the CPU");
  expect_contains(error_of([&] { from_blob(memory, {-2}); }), "negative extent");
}

TEST(Draws, LikeAnother) {
  const Tensor x = zeros({3, 4}, {.dtype = kF64}), key = from_values<int64_t>({5, 6}, {2});
  expect_equal(randn_like(x, key), randn({3, 4}, {.dtype = kF64}, key));
  expect_equal(rand_like(x, key), rand({3, 4}, {.dtype = kF64}, key));
  const Tensor centres = draw({4}), widths = rand({3, 1}, {.dtype = kF64});
  expect_near(normal(centres, widths, key), centres + widths * randn({3, 4}, {.dtype = kF64}, key));
}

TEST(Draws, Exponential) {
  manual_seed(3);
  Tensor t = empty({20'000});
  exponential_(t, 2);
  EXPECT_GT(amin(t).item<float>(), 0);
  EXPECT_NEAR(mean(t).item<double>(), 0.5, 0.02);
  EXPECT_NEAR(mean((t > std::log(2.0) / 2).to(kF64)).item<double>(), 0.5, 0.02);  // the median
  expect_contains(error_of([&] { exponential_(t, 0); }), "rate 0");
}

TEST(Draws, Multinomial) {
  manual_seed(4);
  const Tensor w = tensor({{0., 1., 3., 0.}, {2., 2., 2., 2.}});
  const Tensor many = multinomial(w, 20'000, true);
  ASSERT_EQ(many.shape(), (Shape{2, 20'000}));
  EXPECT_NEAR(mean((many[0] == 2).to(kF64)).item<double>(), 0.75, 0.02);
  EXPECT_EQ(sum((many[0] == 0) | (many[0] == 3)).item<int64_t>(), 0);
  for (int64_t i = 0; i < 4; ++i)
    EXPECT_NEAR(mean((many[1] == i).to(kF64)).item<double>(), 0.25, 0.02);
  int64_t first = 0;
  for (int i = 0; i < 2000; ++i) {
    const Tensor both = multinomial(w[0], 2);
    EXPECT_EQ(both.sum().item<int64_t>(), 3);  // 1 and 2, in either order
    first += both[0].item<int64_t>() == 2;
  }
  EXPECT_NEAR(double(first) / 2000, 0.75, 0.04);
  expect_contains(error_of([&] { multinomial(w, 3); }), "fewer than 3 positive weights");
  expect_contains(error_of([] { multinomial(tensor({1., -1.}), 1); }), "negative or not finite");
  expect_contains(error_of([] { multinomial(tensor({0., 0.}), 1, true); }), "fewer than 1");
}

TEST(Draws, GumbelSoftmax) {
  manual_seed(5);
  const Tensor logits = log(tensor({1., 3.})).expand({20'000, 2});
  const Tensor hard = gumbel_softmax(logits, 0.5, true);
  EXPECT_NEAR(mean(hard.index({Slice(), 1})).item<double>(), 0.75, 0.02);
  EXPECT_TRUE(allclose(sum(hard, 1), ones(20'000)));
  const Tensor soft = gumbel_softmax(logits, 0.5);
  EXPECT_TRUE(allclose(sum(soft, 1), ones(20'000)));
  const Tensor key = from_values<int64_t>({1, 2}, {2});
  Tensor a = draw({3, 4}).requires_grad_(), b = a.detach().clone().requires_grad_();
  const Tensor weights = draw({3, 4});
  sum(gumbel_softmax(a, 1, true, -1, key) * weights).backward();
  sum(gumbel_softmax(b, 1, false, -1, key) * weights).backward();
  expect_near(a.grad(), b.grad());
}

TEST(Draws, DropoutOfChannels) {
  manual_seed(6);
  const Tensor x = ones({8, 64, 3, 2}), y = dropout2d(x, 0.25), channel = y.index({Ellipsis, 0, 0});
  expect_equal(y, channel.reshape({8, 64, 1, 1}).expand({8, 64, 3, 2}));
  expect_equal((channel == 0) | isclose(channel, ones({8, 64}) / 0.75),
               ones({8, 64}, {.dtype = kBool}));
  EXPECT_NEAR(mean((channel == 0).to(kF32)).item<double>(), 0.25, 0.1);
  EXPECT_TRUE(dropout2d(x, 0).is_same(x));
  expect_contains(error_of([] { dropout2d(ones({2, 3}), 0.5); }), "[N, C, H, W]");
}

}  // namespace
}  // namespace tessera
