// Optimizers as objects: groups, learning rates, state, skipped parameters, scale, errors.
#include "core/optim/optim.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/autograd/autograd.h"
#include "core/nn/nn.h"
#include "core/ops/compose.h"
#include "core/ops/create.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "tests/support/temp_folder.h"

namespace tessera::optim {
namespace {

Tensor leaf(double value, Shape shape = {}) {
  return full(shape, value, {.dtype = kF64}).requires_grad_();
}
void give_grad(const Tensor& p, double value) { p.set_grad(full_like(p.detach(), value)); }
double value_of(const Tensor& t) { return t.item<double>(); }

TEST(Optimizer, TrainsASmallNetwork) {
  manual_seed(1);
  auto model = nn::sequential(nn::linear(4, 32), nn::gelu(), nn::linear(32, 1));
  auto opt = AdamW(model->parameters(), {.lr = 1e-2});
  Tensor x = randn({64, 4}), y = sum(square(x), {1}, true);
  double first = 0, last = 0;
  for (int step = 0; step < 200; ++step) {
    Tensor loss = nn::mse_loss((*model)(x), y);
    opt.zero_grad();
    loss.backward();
    opt.step();
    (step == 0 ? first : last) = value_of(loss);
  }
  EXPECT_LT(last, 0.02 * first);
}

TEST(Optimizer, GroupsHaveOptionsOfTheirOwn) {
  Tensor a = leaf(1), b = leaf(1), c = leaf(1);
  SGD opt(std::vector<ParamGroup>{{.params = {{"a", a}}},
                                  {.params = {{"b", b}}, .lr = 0.2},
                                  {.params = {{"c", c}}, .weight_decay = 0.5}},
          {.lr = 0.1});
  for (Tensor& p : std::vector{a, b, c}) give_grad(p, 1);
  opt.step();
  EXPECT_DOUBLE_EQ(value_of(a), 0.9);
  EXPECT_DOUBLE_EQ(value_of(b), 0.8);
  EXPECT_DOUBLE_EQ(value_of(c), 1 - 0.1 * 1.5);
  opt.set_lr(0.01);  // groups keep their ratios
  EXPECT_DOUBLE_EQ(opt.groups()[0].lr.item<double>(), 0.01);
  EXPECT_DOUBLE_EQ(opt.groups()[1].lr.item<double>(), 0.02);
  EXPECT_DOUBLE_EQ(opt.lr(), 0.01);
  EXPECT_EQ(opt.groups()[0].lr.dtype(), kF64);
}

TEST(Optimizer, DecayOfMatricesOnly) {
  auto model = nn::sequential(nn::embedding(5, 4), nn::layer_norm(4), nn::linear(4, 3));
  Params p = decay_matrices_only(model->named_parameters(), 0.1);
  ASSERT_EQ(p.groups.size(), 2u);
  EXPECT_EQ(p.groups[0].params.size(), 2u);
  EXPECT_EQ(p.groups[0].params[1].name, "2.weight");
  EXPECT_EQ(p.groups[0].weight_decay, 0.1);
  EXPECT_EQ(p.groups[1].params.size(), 3u);
  EXPECT_EQ(p.groups[1].weight_decay, 0.0);
}

TEST(Optimizer, ParametersWithoutGradientStayAsTheyAre) {
  Tensor a = leaf(1), b = leaf(1);
  AdamW opt(std::vector{a, b}, {.lr = 0.1});
  give_grad(a, 1);
  opt.step();
  EXPECT_NE(value_of(a), 1);
  EXPECT_EQ(value_of(b), 1);
  opt.zero_grad();
  EXPECT_FALSE(a.grad().defined());
  opt.step();
  EXPECT_EQ(value_of(opt.step_count()), 2);
}

TEST(Optimizer, ALateGradientStartsItsMomentumWhole) {
  Tensor a = leaf(0), b = leaf(0);
  SGD opt(std::vector{a, b}, {.lr = 1, .momentum = 0.9, .dampening = 0.5});
  give_grad(a, 1);
  opt.step();
  give_grad(a, 1), give_grad(b, 1);
  opt.step();
  EXPECT_DOUBLE_EQ(value_of(a), -1 - (0.9 + 0.5));
  EXPECT_DOUBLE_EQ(value_of(b), -1);
}

TEST(Optimizer, ParametersMayBeFrozenAndThawedBetweenSteps) {
  Tensor head = leaf(1, {2}), body = ones({2}), gone = leaf(1, {2});
  std::vector<NamedTensor> params{{"head", head}, {"body", body}, {"gone", gone}};
  AdamW opt(params, {.lr = 0.1});
  give_grad(head, 1), give_grad(gone, 1);
  opt.step();
  gone.requires_grad_(false);
  opt.zero_grad();
  Tensor kept = gone.clone();
  give_grad(head, 1);
  opt.step();
  EXPECT_EQ(gone[0].item<double>(), kept[0].item<double>());
  EXPECT_EQ(opt.named_state().size(), 6u);  // the count, a rate, and two moments each of two
  body.requires_grad_();
  opt.zero_grad();
  give_grad(body, 1);
  opt.step();
  EXPECT_LT(body[0].item<double>(), 1);
  EXPECT_EQ(opt.named_state().size(), 8u);

  AdamW again(std::vector<NamedTensor>{{"head", leaf(1, {2})}, {"body", ones({2})}, {"gone", kept}},
              {.lr = 0.1});
  again.load_state(opt.named_state());
  EXPECT_EQ(again.named_state().size(), 8u);
}

TEST(Optimizer, NamesTellParametersApart) {
  std::vector<NamedTensor> twins{{"weight", leaf(1)}, {"weight", leaf(2)}};
  expect_contains(error_of([&] { SGD opt(twins); }), "two parameters are called weight");
  std::vector<Tensor> same{leaf(1)};
  same.push_back(same[0]);
  expect_contains(error_of([&] { SGD opt(same); }), "parameter 1 is given twice");
  Tensor w = leaf(1);
  expect_contains(error_of([&] { SGD opt(std::vector{w * w}); }), "is the result of an op");
}

TEST(Optimizer, StateRoundTripContinuesTheSameRun) {
  enum Interruption {
    kNone,
    kLoadState,
    kInPlace
  };  // as a checkpoint fills what named_state gives
  for (bool momentum : {false, true}) {
    auto run = [&](Interruption interruption) {
      Tensor p = leaf(1, {3});
      std::vector<NamedTensor> params{{"p", p}};
      auto make = [&] {
        return std::unique_ptr<Optimizer>(
            momentum ? (Optimizer*)new SGD(params, {.lr = 0.1, .momentum = 0.9, .dampening = 0.2})
                     : new AdamW(params, {.lr = 0.1}));
      };
      auto opt = make();
      for (int step = 0; step < 6; ++step) {
        opt->set_lr(0.1 / (step + 1));
        give_grad(p, std::cos(step));
        opt->step();
        if (interruption != kNone && step == 2) {
          std::vector<NamedTensor> copy;
          for (auto& [name, t] : opt->named_state()) copy.push_back({name, t.clone()});
          opt = make();
          if (interruption == kLoadState) opt->load_state(copy);
          std::vector<NamedTensor> fresh = opt->named_state();
          for (size_t i = 0; interruption == kInPlace && i < fresh.size(); ++i)
            assign_(fresh[i].tensor, copy[i].tensor);
        }
      }
      return p[0].item<double>();
    };
    EXPECT_EQ(run(kNone), run(kLoadState));
    EXPECT_EQ(run(kNone), run(kInPlace));
  }
}

TEST(Optimizer, StateHasNamesAndMisfitsAreListed) {
  Tensor p = leaf(1, {2});
  AdamW opt(std::vector<NamedTensor>{{"h.w", p}}, {});
  std::vector<std::string> names;
  for (auto& t : opt.named_state()) names.push_back(t.name);
  EXPECT_EQ(names, (std::vector<std::string>{"step", "lr.0", "exp_avg.h.w", "exp_avg_sq.h.w"}));
  std::vector<NamedTensor> state{
      {"step", scalar_tensor(3.0, kF64)}, {"exp_avg.h.w", zeros({3})}, {"other", zeros({1})}};
  std::string text = error_of([&] { opt.load_state(state); });
  expect_contains(text, "exp_avg.h.w is [2] here, [3]");
  expect_contains(text, "1 unexpected:\n    other");
  expect_contains(text, "2 missing:\n    exp_avg_sq.h.w\n    lr.0");
  EXPECT_EQ(value_of(opt.step_count()), 0);
}

TEST(Optimizer, Refuses) {
  Tensor p = leaf(1);
  expect_contains(error_of([&] { SGD(std::vector<Tensor>{}); }), "no parameters");
  expect_contains(error_of([&] { SGD(std::vector{p, p}); }), "twice");
  expect_contains(error_of([&] { SGD(std::vector{ones({2})}); }),
                  "only parameters that do not require grad");
  expect_contains(error_of([&] { SGD(std::vector{p}, {.lr = -1}); }), "lr -1");
  expect_contains(error_of([&] { SGD(std::vector{p}, {.nesterov = true}); }), "nesterov");
  expect_contains(error_of([&] { AdamW(std::vector{p}, {.betas = {0.9, 1.0}}); }), "beta 1");
  expect_contains(error_of([&] { Lion(std::vector{p}, {.betas = {-0.1, 0.9}}); }), "beta -0.1");
  expect_contains(error_of([&] { RMSprop(std::vector{p}, {.alpha = 1}); }), "alpha 1");
  expect_contains(error_of([&] { RMSprop(std::vector{p}, {.momentum = -1}); }), "momentum -1");
  expect_contains(error_of([&] { Adagrad(std::vector{p}, {.lr_decay = -1}); }), "lr_decay -1");
}

// The mean of squares less the square of the mean, of equal numbers, may round to less than 0.
TEST(Optimizer, ACenteredRmspropOfEqualGradientsStaysFinite) {
  Tensor p = full({64}, 1.0).requires_grad_(), g = arange(1, 65, 1, {kF32}) * 0.1;
  RMSprop opt(std::vector{p}, {.lr = 1e-9, .alpha = 0.5, .centered = true});
  for (int step = 0; step < 60; ++step) {
    p.set_grad(g);
    opt.step();
  }
  EXPECT_TRUE(all(isfinite(p)).item<bool>());
}

// In f16 an eps of 1e-8 is 0, and a gradient of 0 would make a parameter NaN.
TEST(Optimizer, StepsTakeNoSixteenBits) {
  auto check = [](auto make, DType dtype) {
    Tensor p = ones({3}, {.dtype = dtype}).requires_grad_();
    auto opt = make(std::vector{p});
    give_grad(p, 0);
    expect_contains(error_of([&] { opt.step(); }), "keep f32 master weights");
    EXPECT_TRUE(all(eq(p, 1.0)).template item<bool>());
  };
  for (DType dtype : {kF16, kBF16}) {
    check([](auto p) { return SGD(p); }, dtype);
    check([](auto p) { return AdamW(p); }, dtype);
    check([](auto p) { return RMSprop(p); }, dtype);
    check([](auto p) { return Adagrad(p); }, dtype);
    check([](auto p) { return Lion(p); }, dtype);
  }
}

TEST(Optimizer, AStepThatIsNotFiniteChangesNothing) {
  auto check = [](auto make) {
    Tensor p = leaf(1, {3});
    auto opt = make(std::vector{p});
    give_grad(p, 0.5);
    opt.step();
    std::vector<Tensor> before{p.clone()}, after{p};
    for (const NamedTensor& t : opt.named_state()) {
      before.push_back(t.tensor.clone()), after.push_back(t.tensor);
    }
    opt.step_if_finite(scalar_tensor(INFINITY, kF64));
    for (size_t i = 0; i < before.size(); ++i)
      EXPECT_TRUE(all(eq(before[i], after[i])).template item<bool>()) << i;
    opt.step_if_finite(scalar_tensor(1.0, kF64));
    EXPECT_FALSE(all(eq(before[0], p)).template item<bool>());
  };
  check([](auto p) { return RMSprop(p, {.momentum = 0.9, .centered = true}); });
  check([](auto p) { return Adagrad(p, {.lr_decay = 0.1}); });
  check([](auto p) { return Lion(p); });
}

TEST(Clip, ScaleEqualsClippingInPlace) {
  Tensor a = leaf(1, {4}), b = leaf(1, {4});
  SGD one(std::vector{a}, {.lr = 0.1, .weight_decay = 0.1}),
      two(std::vector{b}, {.lr = 0.1, .weight_decay = 0.1});
  give_grad(a, 3), give_grad(b, 3);
  Clip clip = clip_grad_norm(std::vector{a}, 1.5);
  one.step(clip.scale);
  clip_grad_norm_(std::vector{b}, 1.5);
  two.step();
  EXPECT_DOUBLE_EQ(value_of(clip.norm), 6);
  EXPECT_NEAR(a[0].item<double>(), b[0].item<double>(), 1e-15);
}

TEST(Clip, InfinityNormOfAnyDtype) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  Tensor wide = leaf(1, {4}), narrow = ones({3}, {kBF16}).requires_grad_();
  give_grad(wide, -3);
  narrow.set_grad(full({3}, 2.0, {kBF16}));
  auto norm = [&] {
    return value_of(clip_grad_norm(std::vector{wide, narrow}, 1, {.norm_type = kInfinity}).norm);
  };
  EXPECT_EQ(norm(), 3);
  narrow.set_grad(full({3}, -4.0, {kBF16}));
  EXPECT_EQ(norm(), 4);
  wide.set_grad(from_values<double>({1, NAN, 9, 2}, {4}));
  EXPECT_TRUE(std::isnan(norm()));
}

// Rows of one element are computed by code of their own; a zero behind each changes no bit.
TEST(Clip, VectorsAreRowsOfOneElement) {
  manual_seed(2);
  for (DType dtype : {kF32, kF64})
    for (int64_t n : {1, 7, 1000, 70'000}) {
      const Tensor v = randn({n}, {.dtype = dtype});
      const Tensor columns[] = {v, zeros_like(v)};
      EXPECT_EQ(value_of(global_norm({{v}})), value_of(global_norm({{stack(columns, 1)}})))
          << n << " of " << name_of(dtype);
    }
}

TEST(Clip, NonFiniteNormsPoisonOrThrow) {
  Tensor p = leaf(1, {2});
  give_grad(p, NAN);
  EXPECT_TRUE(std::isnan(value_of(clip_grad_norm(std::vector{p}, 1).scale)));
  expect_contains(
      error_of([&] { (void)clip_grad_norm(std::vector{p}, 1, {.error_if_nonfinite = true}); }),
      "nan");
  p.set_grad({});
  EXPECT_EQ(value_of(clip_grad_norm(std::vector{p}, 1).norm), 0);
  EXPECT_EQ(value_of(clip_grad_norm(std::vector{p}, 1).scale), 1);
  expect_contains(error_of([&] { (void)clip_grad_norm(std::vector{p}, 0); }), "max_norm 0");
}

TEST(Schedule, TheRecipeOfTheReferenceRun) {
  Schedule s = schedule("cosine", {.lr = 1e-3, .min_lr = 1e-4, .steps = 2000, .warmup = 100});
  EXPECT_DOUBLE_EQ(s(0), 1e-3 / 101);
  EXPECT_DOUBLE_EQ(s(99), 1e-3 * 100 / 101);
  EXPECT_DOUBLE_EQ(s(100), 1e-3);
  EXPECT_DOUBLE_EQ(s(1050), 1e-4 + 0.5 * 9e-4);
  EXPECT_DOUBLE_EQ(s(2000), 1e-4);
  EXPECT_DOUBLE_EQ(s(5000), 1e-4);
}

TEST(Schedule, KindsAndErrors) {
  EXPECT_EQ(schedule("constant", {.lr = 0.5})(1000), 0.5);
  EXPECT_EQ(schedule("linear", {.lr = 1, .min_lr = 0, .steps = 10})(5), 0.5);
  expect_contains(error_of([] { schedule("cubic", {.steps = 1}); }), "cubic");
  expect_contains(error_of([] { schedule("cosine", {.steps = 5, .warmup = 5}); }), "warm-up of 5");
  expect_contains(error_of([] { schedule("cosine", {.steps = 5, .warmup = INT64_MIN}); }),
                  "warm-up over -9223372036854775808 steps");
  EXPECT_GT(warmup(INT64_MAX, constant(1))(0), 0);
  expect_contains(error_of([] { sequence({constant(1)}, {3}); }), "1 parts");
}

TEST(Schedule, Falls) {
  Schedule e = exponential(2, 0.5), m = multi_step(1, {3, 5}, 0.1);
  EXPECT_EQ(e(0), 2);
  EXPECT_EQ(e(3), 0.25);
  EXPECT_EQ(m(2), 1);
  EXPECT_DOUBLE_EQ(m(3), 0.1);
  EXPECT_DOUBLE_EQ(m(4), 0.1);
  EXPECT_DOUBLE_EQ(m(5), 0.01);
  expect_contains(error_of([] { multi_step(1, {5, 3}); }), "descend");
}

TEST(Schedule, WarmRestartsBeginAgain) {
  Schedule same = cosine_warm_restarts(1, 4), longer = cosine_warm_restarts(1, 2, 2, 0.5);
  for (int64_t step = 0; step < 12; ++step) EXPECT_DOUBLE_EQ(same(step), cosine(1, 0, 4)(step % 4));
  // Periods of 2, 4, 8.
  for (int64_t step = 0; step < 14; ++step) {
    const int64_t period = step < 2 ? 2 : step < 6 ? 4 : 8, at = step - (period - 2);
    EXPECT_DOUBLE_EQ(longer(step), cosine(1, 0.5, period)(at)) << step;
  }
  expect_contains(error_of([] { cosine_warm_restarts(1, 0); }), "over 0 steps");
}

TEST(Schedule, OneCycleRisesAndFalls) {
  Schedule s = one_cycle(1, 100);
  EXPECT_NEAR(s(0), 1.0 / 25, 1e-15);
  EXPECT_DOUBLE_EQ(s(29), 1);  // the last of 30 rising steps
  EXPECT_NEAR(s(99), 1.0 / 25 / 1e4, 1e-15);
  EXPECT_NEAR(s(64), 0.5, 1e-2);  // half of the way down
  for (int64_t step = 0; step < 29; ++step) EXPECT_LT(s(step), s(step + 1));
  for (int64_t step = 29; step < 99; ++step) EXPECT_GT(s(step), s(step + 1));
  expect_contains(error_of([] { one_cycle(1, 10, {.rising = 2}); }), "share 2");
}

TEST(Clip, EveryElementByValue) {
  Tensor p = leaf(0, {3}), none = leaf(0);
  p.set_grad(tensor({-3., 0.5, 2.}, {.dtype = kF64}));
  clip_grad_value_(std::vector{p, none}, 1);
  EXPECT_TRUE(equal(p.grad(), tensor({-1., 0.5, 1.}, {.dtype = kF64})));
  EXPECT_FALSE(none.grad().defined());
  expect_contains(error_of([&] { clip_grad_value_(std::vector{p}, 0); }), "not positive");
}

}  // namespace
}  // namespace tessera::optim
