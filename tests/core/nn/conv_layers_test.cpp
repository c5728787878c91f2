// Layers of convolutional networks: initial values, statistics, printing, and what they refuse.
#include "core/nn/conv_layers.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/autograd/autograd.h"
#include "core/nn/nn.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/views.h"
#include "tests/support/temp_folder.h"

namespace tessera::nn {
namespace {

double difference(const Tensor& a, const Tensor& b) {
  NoGrad off;
  EXPECT_EQ(a.shape(), b.shape());
  return amax(tessera::abs(a - b)).item<double>();
}

TEST(ConvLayers, WeightsAreDrawnAsPyTorchDoes) {
  auto m = nn::conv2d({.in = 32, .out = 64, .kernel = {3, 5}, .groups = 2});
  EXPECT_EQ(m->weight.shape(), Shape({64, 16, 3, 5}));
  double bound = 1 / std::sqrt(16 * 15.0), top = amax(tessera::abs(m->weight)).item<double>();
  EXPECT_LE(top, bound);
  EXPECT_GT(top, 0.99 * bound);
  EXPECT_LE(amax(tessera::abs(m->bias)).item<double>(), bound);
  auto t = nn::conv_transpose2d({.in = 32, .out = 64, .kernel = 3, .groups = 2});
  EXPECT_EQ(t->weight.shape(), Shape({32, 32, 3, 3}));
  EXPECT_LE(amax(tessera::abs(t->weight)).item<double>(), 1 / std::sqrt(32 * 9.0));
  EXPECT_EQ((*t)(randn({1, 32, 4, 4})).shape(), Shape({1, 64, 6, 6}));
}

TEST(ConvLayers, PaddingModesPadFirst) {
  Tensor x = randn({2, 3, 6, 7});
  for (PadMode mode : {PadMode::kReflect, PadMode::kReplicate, PadMode::kCircular}) {
    auto m =
        nn::conv2d({.in = 3, .out = 4, .kernel = {3, 2}, .padding = {1, 2}, .padding_mode = mode});
    Tensor want = tessera::conv2d(pad(x, {2, 2, 1, 1}, mode), m->weight, m->bias);
    EXPECT_EQ(difference((*m)(x), want), 0);
    auto same =
        nn::conv2d({.in = 3, .out = 4, .kernel = {3, 4}, .padding = kSame, .padding_mode = mode});
    EXPECT_EQ((*same)(x).shape(), Shape({2, 4, 6, 7}));
  }
}

TEST(ConvLayers, BatchNormFollowsBatchesAndAverages) {
  auto follow = nn::batch_norm2d({.channels = 3});
  auto average = nn::batch_norm2d({.channels = 3, .momentum = std::nullopt});
  Tensor total = zeros({3});
  for (int i = 0; i < 3; ++i) {
    Tensor x = randn({4, 3, 5, 5}) * 2.0 + double(i);
    (*follow)(x), (*average)(x);
    total = total + mean(x, {0, 2, 3});
  }
  EXPECT_EQ(follow->num_batches_tracked.item<int64_t>(), 3);
  EXPECT_LT(difference(average->running_mean, total / 3.0), 1e-5);
  EXPECT_GT(difference(follow->running_mean, average->running_mean), 0.1);
  Tensor x = randn({1, 3, 2, 2}), before = tessera::clone(follow->running_mean);
  follow->eval();
  Tensor y = (*follow)(x);
  EXPECT_EQ(difference(follow->running_mean, before), 0);
  auto beside = [](const Tensor& t) { return reshape(t, {3, 1, 1}); };
  Tensor want =
      (x - beside(follow->running_mean)) / tessera::sqrt(beside(follow->running_var) + 1e-5);
  EXPECT_LT(difference(y, want), 1e-5);
}

TEST(ConvLayers, BatchNormOfThreeDimsIsThatOfTwoWithADimJoined) {
  auto volume = nn::batch_norm3d({.channels = 3});
  auto two = nn::batch_norm2d({.channels = 3});
  Tensor x = randn({2, 3, 4, 5, 6}) * 3.0 + 1.0;
  EXPECT_EQ(difference(reshape((*volume)(x), {2, 3, 20, 6}), (*two)(reshape(x, {2, 3, 20, 6}))), 0);
  EXPECT_EQ(difference(volume->running_var, two->running_var), 0);
  EXPECT_THROW((*volume)(zeros({2, 3, 4, 5})), ShapeError);
}

// 70 channels: every width of chunk. A residual of another shape is broadcast in a pass of its own.
TEST(ConvLayers, BatchNormTakesResidualAndReluIntoItsPasses) {
  for (bool training : {true, false})
    for (int residual = 0; residual < 3; ++residual)
      for (bool relu : {true, false}) {
        auto m = nn::batch_norm2d({.channels = 70});
        m->train(training);
        Tensor x = randn({3, 70, 5, 4}).requires_grad_(), z, cot = randn({3, 70, 5, 4});
        if (residual) z = randn({residual == 1 ? 3 : 1, 70, 5, 4}).requires_grad_();
        auto plain = [&] {
          Tensor y = (*m)(x);
          if (residual) y = y + z;
          return relu ? tessera::relu(y) : y;
        };
        Tensor got = (*m)(x, {.residual = z, .relu = relu}), want = plain();
        EXPECT_LT(difference(got, want), 1e-5);
        Tensors by{x, m->weight, m->bias};
        if (residual) by.push_back(z);
        auto gradients = [&](const Tensor& y) { return grad(Tensors{y}, by, Tensors{cot}); };
        Tensors g = gradients(got), w = gradients(want);
        for (size_t i = 0; i < g.size(); ++i) EXPECT_LT(difference(g[i], w[i]), 2e-5);
      }
}

TEST(ConvLayers, BatchNormStateHasPyTorchsNames) {
  auto m = sequential(nn::conv2d({.in = 3, .out = 4, .kernel = 3, .bias = false}),
                      nn::batch_norm2d({.channels = 4}));
  std::string names;
  for (const NamedTensor& t : m->state()) names += t.name + " ";
  EXPECT_EQ(names, "0.weight 1.weight 1.bias 1.running_mean 1.running_var 1.num_batches_tracked ");
}

TEST(ConvLayers, PrintAsTheyAreCalled) {
  auto m = sequential(nn::conv2d({.in = 3, .out = 8, .kernel = 3, .stride = 2}),
                      nn::batch_norm2d({.channels = 8}), nn::relu(), nn::max_pool2d(2),
                      nn::adaptive_avg_pool2d(1), nn::flatten());
  EXPECT_EQ((*m)(randn({2, 3, 17, 17})).shape(), Shape({2, 8}));
  std::string text = m->to_string();
  expect_contains(text, "(0): Conv2d(in=3, out=8, kernel=[3, 3], stride=[2, 2], bias=true)");
  expect_contains(text, "(1): BatchNorm2d(channels=8, eps=1e-05, momentum=0.1, affine=true");
  expect_contains(text, "(3): MaxPool2d()");
}

TEST(ConvLayers, RefuseByNameAndValue) {
  auto refused = [](auto f, const char* text) { expect_contains(error_of(f), text); };
  refused([] { nn::conv2d({.in = 3, .out = 4, .kernel = 0}); }, "conv2d: kernel [0]");
  refused([] { nn::conv2d({.in = 0, .out = 4, .kernel = 3}); }, "conv2d: in=0");
  refused([] { nn::conv2d({.in = 3, .out = 4, .kernel = 3, .groups = 2}); }, "groups=2");
  refused([] { nn::batch_norm2d({.channels = 0}); }, "channels=0");
  refused([] { (*nn::batch_norm2d({.channels = 3}))(randn({2, 4, 3, 3})); }, "channels=3");
  refused([] { (*nn::batch_norm2d({.channels = 3}))(randn({2, 3, 3})); }, "expected 4 dims");
  refused([] { (*nn::batch_norm2d({.channels = 3}))(randn({1, 3, 1, 1})); }, "1 values a channel");
  refused([] { nn::group_norm({.groups = 3, .channels = 4}); }, "channels=4");
}

}  // namespace
}  // namespace tessera::nn
