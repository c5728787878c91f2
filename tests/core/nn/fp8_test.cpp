// Layers in eight bits against products of tensors that the test quantises itself, in f64, and
// against f32 within the rounding of the formats.
#include "core/nn/fp8.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/autograd/autocast.h"
#include "core/autograd/autograd.h"
#include "core/nn/nn.h"
#include "core/ops/compose.h"
#include "core/ops/contract.h"
#include "core/ops/create.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "tests/support/counted_ops.h"
#include "tests/support/temp_folder.h"

namespace tessera::nn {
namespace {

constexpr double kX = 0x1p-4, kGrad = 0x1p-3;  // the largest relative rounding of E4M3, of E5M2

Tensor drawn(const Shape& s, int64_t key) {
  return randn(s, {kF32}, from_values<int64_t>({key, 8}, {2}));
}
double largest(const Tensor& t) { return amax(tessera::abs(t)).item<double>(); }
float item(const Tensor& t) { return t.to(kF32).item<float>(); }
// t as the format keeps it, scaled by `most` for its largest value; in f64.
Tensor kept(const Tensor& t, DType format, double most) {
  const double limit = format == kF8E4M3 ? 448 : 57344;
  const Tensor scale = full({}, most, {.dtype = kF32}) / limit;
  return cast(cast(clamp(t / scale, -limit, limit), format), kF64) * cast(scale, kF64);
}
Tensor kept(const Tensor& t, DType format) { return kept(t, format, largest(t)); }
// Whether elements differ by at most `relative` of `sizes`, their sums of magnitudes.
void expect_within(const Tensor& got, const Tensor& want, const Tensor& sizes, double relative,
                   const char* what) {
  NoGrad off;
  const Tensor excess = tessera::abs(got.to(kF64) - want.to(kF64)) - sizes.to(kF64) * relative;
  EXPECT_LE(amax(excess).item<double>(), 0) << what;
}

struct Step {
  Tensor y, dx, dw, db;
};
Step step_of(Linear& layer, const Tensor& values, const Tensor& dy) {
  Tensor x = clone(values);
  x.requires_grad_();
  const Tensor y = layer(x);
  backward(y, dy);
  return {y.detach(), x.grad(), layer.weight.grad(), layer.bias.grad()};
}

TEST(Fp8, ForwardAndBackwardMultiplyQuantisedTensors) {
  Linear layer(48, 32);
  layer.init(3);
  Linear plain(48, 32);
  plain.init(3);
  convert_to_fp8(layer);
  const Tensor x = drawn({3, 5, 48}, 1), dy = drawn({3, 5, 32}, 2) * 1e-4;
  const Step got = step_of(layer, x, dy), want = step_of(plain, x, dy);
  const Tensor w = layer.weight.detach(), b = layer.bias.detach();
  const Tensor rows = reshape(x, {15, 48}), cot = reshape(dy, {15, 32});
  const Tensor qx = kept(rows, kF8E4M3), qw = kept(w, kF8E4M3), qd = kept(cot, kF8E5M2);
  const auto product = [](const char* spec, const Tensor& a, const Tensor& b) {
    return contract(spec, a.to(kF64), b.to(kF64));
  };
  const auto sizes = [&](const char* spec, const Tensor& a, const Tensor& b) {
    return product(spec, tessera::abs(a), tessera::abs(b)) + 1e-30;
  };
  const Tensor y = reshape(got.y, {15, 32}), dx = reshape(got.dx, {15, 48});
  const Tensor size_y = sizes("mk,nk->mn", rows, w) + tessera::abs(b.to(kF64)),
               size_dx = sizes("mn,nk->mk", cot, w), size_dw = sizes("mn,mk->nk", cot, rows);
  // What differs here is the order of f32 sums.
  expect_within(y, product("mk,nk->mn", qx, qw) + b.to(kF64), size_y, 1e-5, "y");
  expect_within(dx, product("mn,nk->mk", qd, qw), size_dx, 1e-5, "dx");
  expect_within(got.dw, product("mn,mk->nk", qd, qx), size_dw, 1e-5, "dw");
  EXPECT_EQ(largest(got.db - want.db), 0) << "the bias sums dy as it is";
  // Each factor is off by its format's half unit, so a term by (1 + a)(1 + b) - 1. Factors below
  // E4M3's normal range, 2^-15 of the largest, are off by 2^-19 of that: a share of sizes below
  // 1e-3.
  expect_within(y, reshape(want.y, {15, 32}), size_y, (1 + kX) * (1 + kX) - 1 + 1e-3, "y");
  expect_within(dx, reshape(want.dx, {15, 48}), size_dx, (1 + kX) * (1 + kGrad) - 1 + 1e-3, "dx");
  expect_within(got.dw, want.dw, size_dw, (1 + kX) * (1 + kGrad) - 1 + 1e-3, "dw");
}

TEST(Fp8, ResultsHaveTheDtypeOfAutocastAndGradientsThoseOfTheirTensors) {
  auto layer = linear(16, 32);
  convert_to_fp8(*layer);
  Tensor x = drawn({4, 16}, 1);
  x.requires_grad_();
  Tensor y;
  {
    Autocast scope(kBF16);
    y = (*layer)(x);
  }
  EXPECT_EQ(y.dtype(), kBF16);
  backward(sum(y));
  EXPECT_EQ(x.grad().dtype(), kF32);
  EXPECT_EQ(layer->weight.grad().dtype(), kF32);
  EXPECT_EQ((*layer)(x).dtype(), kF32);
  EXPECT_EQ((*layer)(x.detach().to(kBF16)).dtype(), kF32) << "the bias is f32";
  EXPECT_THROW((*layer)(x.detach().to(kF64)), UserError);
  expect_contains(error_of([&] { (*layer)(ones({4, 8})); }), "does not fit weight [32, 16]");
}

TEST(Fp8, ZerosStayAndWhatIsNotFiniteShows) {
  for (Fp8Recipe recipe : {Fp8Recipe::kCurrent, Fp8Recipe::kDelayed}) {
    auto layer = linear({.in = 16, .out = 16, .bias = false});
    convert_to_fp8(*layer, {.recipe = recipe});
    EXPECT_EQ(largest((*layer)(zeros({4, 16}))), 0);
    EXPECT_EQ((*layer)(zeros({0, 16})).shape(), (Shape{0, 16}));
    if (recipe == Fp8Recipe::kDelayed) (*layer)(ones({4, 16})), update_fp8_scales(*layer);
    for (float wrong : {INFINITY, NAN}) {
      Tensor x = ones({4, 16});
      x[2][3] = double(wrong);
      EXPECT_TRUE(std::isnan(item(sum((*layer)(x)))));
      update_fp8_scales(*layer);
      for (const NamedTensor& t : layer->state())
        EXPECT_TRUE(std::isfinite(item(sum(t.tensor)))) << t.name;
      EXPECT_TRUE(std::isfinite(item(sum((*layer)(ones({4, 16}))))));
    }
  }
}

TEST(Fp8, DelayedScalesAreThoseOfTheStepsBefore) {
  auto layer = linear({.in = 16, .out = 16, .bias = false});
  convert_to_fp8(*layer, {.recipe = Fp8Recipe::kDelayed, .history = 2});
  const Tensor qw = kept(layer->weight.detach(), kF8E4M3), x = drawn({8, 16}, 1);
  // One step with x times `factor`, whose scale is that of a tensor whose largest value is `most`.
  const auto step = [&](double factor, double most) {
    const Tensor t = x * factor;
    Tensor y = (*layer)(t);
    backward(sum(square(y)));
    const Tensor want = contract("mk,nk->mn", kept(t, kF8E4M3, most * largest(x)), qw);
    EXPECT_LT(largest(y.detach().to(kF64) - want), 1e-5 * factor) << factor;
    update_fp8_scales(*layer);
  };
  step(1, 1);  // nothing is known yet
  step(3, 1);  // clamped
  step(1, 3);
  step(1, 3);
  step(1, 1);  // 3 is forgotten
  {
    Tensor y = (*layer)(x * 5.0);
    (*layer)(x);  // a second micro-batch takes nothing away
    layer->eval();
    (*layer)(x * 9.0);  // not recorded
    layer->train();
    update_fp8_scales(*layer);
  }
  step(1, 5);
  const auto state = layer->state();
  ASSERT_EQ(state.size(), 2u);
  EXPECT_TRUE(is_fp8_history(state[1].name));
  EXPECT_EQ(state[1].tensor.shape(), (Shape{3, 2}));
  EXPECT_FLOAT_EQ(item(state[1].tensor[0][1]), float(5 * largest(x)));
  EXPECT_GT(item(state[1].tensor[2][0]), 0) << "gradients have a history";
  layer->init(1);
  EXPECT_EQ(largest(layer->state()[1].tensor), 0);
}

TEST(Fp8, PowersOfTwoAreTheNextOnesOfTheScales) {
  auto layer = linear(16, 16);
  convert_to_fp8(*layer, {.power_of_two_scales = true, .gather_in_eight_bits = true});
  const auto weight = fp8_weight_to_gather(*layer);
  ASSERT_TRUE(weight);
  std::vector<float> most{0, 1e-40f, 0x1p-126f, 3e38f, 0x1.fffffep127f};
  for (int k = -130; k < 119; ++k)
    for (double x : {448.0, 447.0, 449.0, 300.0, 500.0})
      for (double nudge : {-0x1p-23, 0.0, 0x1p-23})
        most.push_back(float(std::ldexp(x * (1 + nudge), k)));
  const Tensor all = from_values<float>(most, {int64_t(most.size())});
  const Tensor scales = weight->scale_of(all);
  for (size_t i = 0; i < most.size(); ++i) {
    const float s = scales.values<float>()[i], exact = most[i] / 448.0f;
    int exponent;
    ASSERT_EQ(std::frexp(s, &exponent), 0.5f) << most[i] << " " << s;
    ASSERT_GE(s, exact) << most[i];
    ASSERT_TRUE(s == 0x1p-126f || s / 2 < exact) << most[i] << " " << s;
  }
  for (float x : {INFINITY, NAN})
    EXPECT_FALSE(std::isfinite(item(weight->scale_of(full({}, double(x), {kF32}))))) << x;
}

// Whole numbers up to 5 are among those of E4M3, and up to 4 among those of E5M2; 5 / 448 is no
// power of two.
TEST(Fp8, PowersOfTwoRoundNothing) {
  const auto whole = [](const Shape& s, int64_t key, double most) {
    return round(clamp(drawn(s, key) * 3.0, -most, most)) * 0x1p-7;
  };
  for (Fp8Recipe recipe : {Fp8Recipe::kCurrent, Fp8Recipe::kDelayed}) {
    auto plain = linear({.in = 64, .out = 32, .bias = false}),
         exact = linear({.in = 64, .out = 32, .bias = false}),
         rounded = linear({.in = 64, .out = 32, .bias = false});
    const Tensor w = whole({32, 64}, 1, 5), dy = whole({24, 32}, 3, 4);
    convert_to_fp8(*exact, {.recipe = recipe, .power_of_two_scales = true});
    convert_to_fp8(*rounded, {.recipe = recipe});
    std::vector<Step> steps;
    for (const LinearPtr& layer : {plain, exact, rounded}) {
      NoGrad off;
      assign_(layer->weight, w);
    }
    for (int step = 0; step < 2; ++step)  // with a history and without
      for (const LinearPtr& layer : {plain, exact, rounded}) {
        layer->zero_grad();
        Tensor x = whole({24, 64}, 2, 5);
        x.requires_grad_();
        const Tensor y = (*layer)(x);
        backward(y, dy);
        steps.push_back({y.detach(), x.grad(), layer->weight.grad(), {}});
        update_fp8_scales(*layer);
      }
    for (size_t i = 0; i < steps.size(); i += 3) {
      const Step &want = steps[i], &got = steps[i + 1], &other = steps[i + 2];
      EXPECT_TRUE(equal(got.y, want.y) && equal(got.dx, want.dx) && equal(got.dw, want.dw));
      EXPECT_FALSE(equal(other.y, want.y) || equal(other.dx, want.dx) || equal(other.dw, want.dw));
    }
  }
}

TEST(Fp8, GradientsThatNobodyReadsCostNoProduct) {
  for (const auto& [input, weight, products] :
       {std::tuple{true, true, 3}, {true, false, 2}, {false, true, 2}, {false, false, 1}}) {
    auto layer = linear(32, 16);
    convert_to_fp8(*layer);
    layer->weight.requires_grad_(weight);
    Tensor x = drawn({8, 32}, 1);
    x.requires_grad_(input);
    auto whole = linear(32, 16);
    convert_to_fp8(*whole);
    for (const char* name : {"weight", "bias"}) {
      NoGrad off;
      assign_(whole->slot(name), layer->slot(name));
    }
    const Step want = step_of(*whole, x.detach(), ones({8, 16}));
    test::CountedOps counted;
    backward((*layer)(x), ones({8, 16}));  // of the bias, too
    EXPECT_EQ(counted.of("scaled_matmul"), products) << input << weight;
    ASSERT_EQ(x.grad().defined(), input);
    ASSERT_EQ(layer->weight.grad().defined(), weight);
    EXPECT_TRUE(!input || equal(x.grad(), want.dx));
    EXPECT_TRUE(!weight || equal(layer->weight.grad(), want.dw));
  }
}

TEST(Fp8, ThereIsNoSecondDerivative) {
  auto layer = linear(16, 16);
  convert_to_fp8(*layer);
  Tensor x = drawn({4, 16}, 1);
  x.requires_grad_();
  const Tensor y = sum(square((*layer)(x)));
  expect_contains(error_of([&] { backward(y, {}, {.create_graph = true}); }),
                  "no second derivative");
}

TEST(Fp8, ConversionNamesWhatItTakesAndRefuses) {
  const auto make = [] {
    return sequential(linear(32, 48), gelu(), linear(48, 16), gelu(), linear(16, 10));
  };
  auto model = make();
  expect_contains(error_of([&] { convert_to_fp8(*model); }), "\"4\" has in=16 and out=10");
  expect_contains(error_of([&] { convert_to_fp8(*model, {.skip = {"5"}}); }), "\"5\"");
  EXPECT_EQ(model->to_string().find("fp8"), std::string::npos) << "nothing was converted";
  Fp8Layers done = convert_to_fp8(*model, {.skip = {"4"}});
  EXPECT_EQ(done.converted, (std::vector<std::string>{"0", "2"}));
  EXPECT_EQ(done.left, (std::vector<std::string>{"4"}));
  EXPECT_NE(model->to_string().find("fp8=current"), std::string::npos);
  expect_contains(error_of([&] { convert_to_fp8(*model, {.skip = {"4"}}); }), "converted already");
  model = make();
  EXPECT_EQ(convert_to_fp8(*model, {.skip_unfit = true}).converted.size(), 2u);
  auto narrow = sequential(linear(16, 10));
  EXPECT_TRUE(convert_to_fp8(*narrow, {.skip_unfit = true}).converted.empty());
  expect_contains(error_of([&] { convert_to_fp8(*narrow, {.history = 0}); }), "history=0");
}

}  // namespace
}  // namespace tessera::nn
