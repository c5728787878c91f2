// Loss scaling: when the scale moves, what a skipped step leaves alone, and that scaling by a power
// of two changes nothing else.
#include "core/optim/grad_scaler.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "core/autograd/autocast.h"
#include "core/autograd/autograd.h"
#include "core/nn/nn.h"
#include "core/ops/contract.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/optim/optim.h"
#include "core/tensor/random.h"

namespace tessera::optim {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity(),
                 kNan = std::numeric_limits<double>::quiet_NaN();

std::vector<NamedTensor> copies(const std::vector<NamedTensor>& list) {
  std::vector<NamedTensor> out;
  for (const NamedTensor& t : list) out.push_back({t.name, t.tensor.detach().clone()});
  return out;
}
void expect_same(const std::vector<NamedTensor>& got, const std::vector<NamedTensor>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    const Tensor &a = got[i].tensor, &b = want[i].tensor;
    EXPECT_EQ(std::memcmp(a.raw_values(), b.raw_values(), b.nbytes()), 0) << want[i].name;
  }
}
void give_grad(const Tensor& p, double value) { p.set_grad(full_like(p.detach(), value)); }

std::unique_ptr<Optimizer> make(bool adam, const std::vector<NamedTensor>& params) {
  if (adam) return std::make_unique<AdamW>(params, AdamWOptions{.lr = 0.1});
  return std::make_unique<SGD>(params, SGDOptions{.lr = 0.1, .momentum = 0.9});
}

TEST(GradScaler, ScaleFollowsTheGradients) {
  Tensor w = ones({3}).requires_grad_();
  SGD opt(std::vector<Tensor>{w}, {.lr = 0.1});
  GradScaler scaler({.growth_interval = 3});
  EXPECT_EQ(scaler.current_scale(), 65536);
  auto step = [&](double gradient) {
    give_grad(w, gradient);
    scaler.step(opt);
    scaler.update();
    return scaler.current_scale();
  };
  EXPECT_EQ(step(1), 65536);
  EXPECT_EQ(step(1), 65536);
  EXPECT_EQ(step(1), 131072) << "three good steps";
  EXPECT_EQ(step(1), 131072);
  EXPECT_FALSE(scaler.skipped());
  EXPECT_EQ(step(kInf), 65536);
  EXPECT_TRUE(scaler.skipped());
  EXPECT_EQ(step(kNan), 32768);
  EXPECT_EQ(step(1), 32768) << "counting begins again";
  EXPECT_FALSE(scaler.skipped());
  EXPECT_EQ(step(1), 32768);
  EXPECT_EQ(step(1), 65536);
}

TEST(GradScaler, DoesNotGrowBeyondFiniteNumbers) {
  Tensor w = ones({1}).requires_grad_();
  SGD opt(std::vector<Tensor>{w});
  GradScaler scaler({.init_scale = 0x1p127, .growth_interval = 1});
  give_grad(w, 1);
  scaler.step(opt), scaler.update();
  EXPECT_EQ(scaler.current_scale(), 0x1p127);
}

TEST(GradScaler, ASkippedStepChangesNothing) {
  for (bool adam : {true, false})
    for (double bad : {kInf, -kInf, kNan}) {
      Tensor a = rand({40}).requires_grad_(), b = rand({3, 5}).requires_grad_();
      auto opt = make(adam, {{"a", a}, {"b", b}});
      GradScaler scaler;
      give_grad(a, 1), give_grad(b, 2);
      scaler.step(*opt), scaler.update();
      auto state = copies(opt->named_state()), params = copies({{"a", a}, {"b", b}});
      give_grad(a, 1);
      Tensor g = ones({3, 5});
      g.data<float>()[7] = float(bad);  // a single one
      b.set_grad(g);
      scaler.step(*opt), scaler.update();
      EXPECT_TRUE(scaler.skipped());
      expect_same(opt->named_state(), state);
      expect_same({{"a", a}, {"b", b}}, params);
      give_grad(b, 1);
      scaler.step(*opt), scaler.update();
      EXPECT_EQ(opt->step_count().item<double>(), 2);
      EXPECT_NE(a.detach().values<float>()[0], params[0].tensor.values<float>()[0]);
    }
}

// Powers of two change no digit, so scaled training is unscaled training.
TEST(GradScaler, ScaledTrainingIsUnscaledTraining) {
  enum class How { kPlain, kNoClip, kClip, kUnscaleThenClip };
  auto train = [](How how, bool clipped) {
    manual_seed(1);
    auto model = nn::sequential(nn::linear(4, 16), nn::gelu(), nn::linear(16, 1));
    auto opt = AdamW(model->named_parameters(), {.lr = 1e-2});
    GradScaler scaler({.init_scale = 1024, .growth_interval = 3, .enabled = how != How::kPlain});
    Tensor x = randn({32, 4}), y = sum(square(x), {1}, true);
    for (int step = 0; step < 8; ++step) {
      scaler.scale(nn::mse_loss((*model)(x), y)).backward();
      Clip clip;
      auto params = model->parameters();
      if (how == How::kUnscaleThenClip) scaler.unscale_(opt);
      if (clipped)
        clip = clip_grad_norm(
            params, 0.1,
            {.grad_scale = how == How::kUnscaleThenClip ? Tensor() : scaler.inverse_scale()});
      scaler.step(opt, clip);
      scaler.update();
      opt.zero_grad();
    }
    std::vector<NamedTensor> out = copies(model->named_parameters());
    for (NamedTensor& t : copies(opt.named_state())) out.push_back(t);
    return out;
  };
  expect_same(train(How::kNoClip, false), train(How::kPlain, false));
  expect_same(train(How::kUnscaleThenClip, false), train(How::kPlain, false));
  expect_same(train(How::kClip, true), train(How::kPlain, true));
  expect_same(train(How::kUnscaleThenClip, true), train(How::kPlain, true));
}

// Gradients of 1e-9 are zero in f16 without a scale, and are not in bf16.
TEST(GradScaler, SmallGradientsSurviveInHalf) {
  auto gradient = [](DType dtype, bool scaled) {
    Tensor x = full({1, 4}, 1.0), w = full({1, 4}, 0.5).requires_grad_();
    GradScaler scaler({.enabled = scaled});
    SGD opt(std::vector<Tensor>{w}, {.lr = 1});
    {
      Autocast scope(dtype);
      scaler.scale(mean(linear(x, w)) * 1e-9).backward();
    }
    scaler.unscale_(opt);
    return double(w.grad().values<float>()[0]);
  };
  EXPECT_EQ(gradient(kF16, false), 0);
  EXPECT_NEAR(gradient(kF16, true), 1e-9, 1e-11);
  EXPECT_NEAR(gradient(kBF16, false), 1e-9, 1e-11);
}

TEST(GradScaler, SeveralOptimizersDecideForThemselves) {
  Tensor a = ones({2}).requires_grad_(), b = ones({2}).requires_grad_();
  SGD first(std::vector<Tensor>{a}, {.lr = 1}), second(std::vector<Tensor>{b}, {.lr = 1});
  GradScaler scaler({.init_scale = 4});
  give_grad(a, kInf), give_grad(b, 4);
  scaler.step(first), scaler.step(second);
  scaler.update();
  EXPECT_EQ(a.detach().values<float>()[0], 1);
  EXPECT_EQ(b.detach().values<float>()[0], 0);
  EXPECT_EQ(scaler.current_scale(), 2) << "one of them met it";
}

TEST(GradScaler, StateIsSavedAndLoaded) {
  Tensor w = ones({1}).requires_grad_();
  SGD opt(std::vector<Tensor>{w}, {.lr = 0});
  GradScaler scaler({.growth_interval = 4}), other({.growth_interval = 4});
  auto steps = [&](GradScaler& s, int n) {
    for (int i = 0; i < n; ++i) give_grad(w, 1), s.step(opt), s.update();
  };
  give_grad(w, kInf), scaler.step(opt), scaler.update();
  steps(scaler, 3);
  other.load_state(copies(scaler.named_state()));
  EXPECT_EQ(other.current_scale(), 32768);
  steps(other, 1);
  EXPECT_EQ(other.current_scale(), 65536) << "the fourth good step";
  EXPECT_THROW(other.load_state({}), UserError);
}

TEST(GradScaler, DisabledPassesEverything) {
  Tensor w = ones({2}).requires_grad_(), loss = sum(w);
  SGD opt(std::vector<Tensor>{w}, {.lr = 0.5});
  GradScaler scaler({.enabled = false});
  EXPECT_TRUE(scaler.scale(loss).is_same(loss));
  EXPECT_FALSE(scaler.inverse_scale().defined());
  EXPECT_TRUE(scaler.named_state().empty());
  scaler.scale(loss).backward();
  scaler.unscale_(opt), scaler.step(opt), scaler.update();
  EXPECT_EQ(w.detach().values<float>()[0], 0.5f);
  EXPECT_EQ(scaler.current_scale(), 1);
  EXPECT_FALSE(scaler.skipped());
}

// 2^-30 is 0 in f16.
TEST(GradScaler, UnscalesSixteenBitsByAnyScale) {
  Tensor w = ones({2}, {.dtype = kF16}).requires_grad_();
  SGD opt(std::vector<Tensor>{w});
  GradScaler scaler({.init_scale = 0x1p30});
  give_grad(w, 0x1p14);
  scaler.unscale_(opt);
  EXPECT_EQ(w.grad()[0].item<float>(), 0x1p-16F);
}

TEST(GradScaler, MisuseIsAnError) {
  Tensor w = ones({2}).requires_grad_();
  SGD opt(std::vector<Tensor>{w});
  GradScaler scaler;
  give_grad(w, 1);
  EXPECT_THROW(scaler.step(opt, clip_grad_norm(opt.parameters(), 1.0)), UserError)
      << "not unscaled";
  Clip scaled = clip_grad_norm(opt.parameters(), 1.0, {.grad_scale = scaler.inverse_scale()});
  scaler.unscale_(opt);
  EXPECT_THROW(scaler.unscale_(opt), UserError);
  EXPECT_THROW(scaler.step(opt, scaled), UserError) << "unscaled twice";
  EXPECT_THROW(GradScaler({.init_scale = 0}), UserError);
  EXPECT_THROW(GradScaler({.growth_factor = 1}), UserError);
  EXPECT_THROW(GradScaler({.backoff_factor = 1}), UserError);
  EXPECT_THROW(GradScaler({.growth_interval = 0}), UserError);
  EXPECT_THROW(GradScaler().update(), UserError) << "no step";
  SGD damped(std::vector<Tensor>{w}, {.momentum = 0.9, .dampening = 0.5});
  EXPECT_THROW(GradScaler().step(damped), UserError);
}

}  // namespace
}  // namespace tessera::optim
