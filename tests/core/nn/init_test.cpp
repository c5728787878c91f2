// Initial values: statistics of the distributions, PyTorch's defaults, and independence of order.
#include "core/nn/init.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/autograd/autograd.h"
#include "core/nn/nn.h"
#include "core/ops/create.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/views.h"
#include "tests/support/temp_folder.h"

namespace tessera::nn {
namespace {

struct Statistics {
  double mean, std, low, high;
};
Statistics of(const Tensor& t) {
  NoGrad off;
  Tensor x = t.to(kF64);
  return {tessera::mean(x).item<double>(), tessera::stddev(x).item<double>(),
          amin(x).item<double>(), amax(x).item<double>()};
}
bool equal(const Tensor& a, const Tensor& b) {
  NoGrad off;
  return a.shape() == b.shape() && all(eq(a, b)).item<bool>();
}

TEST(Init, Distributions) {
  manual_seed(1);
  Tensor t = empty({400, 250});
  normal_(t, 1, 0.5);
  Statistics s = of(t);
  EXPECT_NEAR(s.mean, 1, 0.01);
  EXPECT_NEAR(s.std, 0.5, 0.01);
  uniform_(t, -2, 4);
  s = of(t);
  EXPECT_NEAR(s.mean, 1, 0.03);
  EXPECT_NEAR(s.std, 6 / std::sqrt(12.0), 0.03);
  EXPECT_GE(s.low, -2);
  EXPECT_LT(s.high, 4.0001);
  xavier_uniform_(t);
  s = of(t);
  EXPECT_NEAR(s.high, std::sqrt(6.0 / 650), 1e-4);
  EXPECT_NEAR(s.low, -s.high, 1e-4);
  xavier_normal_(t, 2);
  EXPECT_NEAR(of(t).std, 2 * std::sqrt(2.0 / 650), 0.002);
  kaiming_uniform_(t, 0);
  EXPECT_NEAR(of(t).high, std::sqrt(6.0 / 250), 1e-4);
  kaiming_normal_(t, 0);
  EXPECT_NEAR(of(t).std, std::sqrt(2.0 / 250), 0.002);
  EXPECT_EQ(fans_of({4, 3, 5, 5}).in, 75);
  EXPECT_EQ(fans_of({4, 3, 5, 5}).out, 100);
  expect_contains(error_of([] { fans_of({3}); }), "[3]");
}

TEST(Init, TruncatedNormalHasItsMomentsAndBounds) {
  manual_seed(2);
  for (DType dtype : {kF32, kF64}) {
    Tensor t = empty({100'000}, dtype);
    trunc_normal_(t, 0, 1, -2, 2);
    Statistics s = of(t);
    EXPECT_NEAR(s.mean, 0, 0.015);
    EXPECT_NEAR(s.std, 0.8796, 0.01);  // of the normal cut at 2
    EXPECT_GE(s.low, -2);
    EXPECT_LE(s.high, 2);
    EXPECT_LT(s.low, -1.9);
    EXPECT_GT(s.high, 1.9);
  }
  // A wide cut is the normal itself: its quantiles, far into the tail.
  Tensor t = empty({200'000}, kF64);
  trunc_normal_(t, 0, 1, -8, 8);
  EXPECT_NEAR(of(t).std, 1, 0.01);
  EXPECT_NEAR(mean(lt(t, -1.959964).to(kF64)).item<double>(), 0.025, 0.002);
  EXPECT_NEAR(mean(gt(t, 3.0).to(kF64)).item<double>(), 0.00135, 0.0004);
  expect_contains(error_of([&] { trunc_normal_(t, 0, 1, 2, 1); }), "low 2");
}

TEST(Init, LayersHavePyTorchsDefaults) {
  manual_seed(4);
  auto l = linear(100, 300);
  EXPECT_NEAR(of(l->weight).high, 0.1, 1e-3);
  EXPECT_NEAR(of(l->weight).low, -0.1, 1e-3);
  EXPECT_NEAR(of(l->weight).std, 0.1 / std::sqrt(3.0), 1e-3);
  EXPECT_NEAR(of(l->bias).high, 0.1, 5e-3);
  auto e = nn::embedding(300, 100);
  EXPECT_NEAR(of(e->weight).std, 1, 0.02);
  auto n = nn::layer_norm(16);
  EXPECT_EQ(of(n->weight).low, 1);
  EXPECT_EQ(of(n->bias).high, 0);
  auto a = multihead_attention({.dim = 64, .heads = 4});
  EXPECT_NEAR(of(a->q_proj->weight).high, std::sqrt(6.0 / 256), 1e-3);
  EXPECT_EQ(of(a->out_proj->bias).high, 0);
  EXPECT_TRUE(l->weight.requires_grad());
}

TEST(Init, DependsOnSeedAndNameOnly) {
  auto a = sequential(linear(3, 4), relu(), linear(4, 5));
  manual_seed(99);
  auto first = linear(7, 7);
  auto b = sequential(linear(3, 4), relu(), linear(4, 5));
  a->init(5), b->init(5);
  EXPECT_TRUE(equal(a->slot("2.weight"), b->slot("2.weight")));
  EXPECT_TRUE(equal(a->slot("0.bias"), b->slot("0.bias")));
  b->init(6);
  EXPECT_FALSE(equal(a->slot("2.weight"), b->slot("2.weight")));
  // The same name means the same values, whatever else the model holds.
  auto c = sequential(relu(), relu(), linear(4, 5));
  c->init(5);
  EXPECT_TRUE(equal(a->slot("2.weight"), c->slot("2.weight")));
  auto d = sequential(linear(4, 5));
  d->init(5);
  EXPECT_FALSE(equal(a->slot("2.weight"), d->slot("0.weight")));
}

TEST(Init, ConstructionFollowsTheGenerator) {
  manual_seed(7);
  auto a = linear(3, 4), b = linear(3, 4);
  manual_seed(7);
  auto c = linear(3, 4);
  EXPECT_TRUE(equal(a->weight, c->weight));
  EXPECT_FALSE(equal(a->weight, b->weight));
}

TEST(Init, MetaModelsTakeNoMemoryAndAnyDtype) {
  {
    OnDevice meta(kMeta);
    auto big = linear(1 << 20, 1 << 20);
    EXPECT_TRUE(big->weight.device().is_meta());
    EXPECT_EQ(big->num_parameters(), (int64_t(1) << 40) + (1 << 20));
  }
  EXPECT_TRUE(linear(2, 2)->weight.device().is_cpu());
  SkipInit no_values;
  EXPECT_EQ(linear(2, 3)->weight.shape(), Shape({3, 2}));
}

}  // namespace
}  // namespace tessera::nn
