// The search for the op that makes the first NaN or infinity of a step.
#include "core/nn/nonfinite.h"

#include <gtest/gtest.h>

#include <limits>

#include "core/autograd/autograd.h"
#include "core/nn/nn.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"

namespace tessera::nn {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// A module with an op that can be chosen.
struct Apply final : Module {
  explicit Apply(std::function<Tensor(const Tensor&)> f) : f(std::move(f)) {}
  std::function<Tensor(const Tensor&)> f;

 protected:
  Tensor forward(Tensor x) override { return f(x); }
};
struct Net final : Module {
  explicit Net(std::function<Tensor(const Tensor&)> f) {
    first = register_module("first", linear(3, 3));
    middle = register_module("middle", std::make_shared<Apply>(std::move(f)));
    draw();
  }
  void reset(const InitKeys&) override {
    for (const Tensor& p : parameters()) ones_(p);
  }
  LinearPtr first;
  std::shared_ptr<Apply> middle;

 protected:
  Tensor forward(Tensor x) override { return (*middle)((*first)(x)); }
};

TEST(NonFiniteSearch, NamesTheOpAndItsModule) {
  Net net([](const Tensor& x) { return log(x - 10.0); });
  NonFiniteSearch search;
  Tensor loss = sum(net(ones({2, 3})));
  ASSERT_TRUE(search.first_nan());
  EXPECT_EQ(search.first_nan()->op, "log");
  EXPECT_EQ(search.first_nan()->scope, "middle");
  EXPECT_EQ(search.first_nan()->operands, "f32[2, 3]");
  EXPECT_FALSE(search.first_infinity());
  EXPECT_EQ(search.story(), "log of f32[2, 3] in middle (forward) made the first NaN");
}

TEST(NonFiniteSearch, WhatIsTooLargeForNarrowFloats) {
  const Tensor large = tensor({400, -70000.0}), fits = tensor({400, -0.001});
  for (DType t : {kF8E4M3, kF8E5M2, kF16}) {
    NonFiniteSearch search;
    fits.to(t);
    EXPECT_EQ(search.story(), "") << name_of(t);
    large.to(t);
    EXPECT_EQ(search.first_nan().has_value(), t == kF8E4M3) << name_of(t);
    EXPECT_EQ(search.first_infinity().has_value(), t != kF8E4M3) << name_of(t);
  }
}

TEST(NonFiniteSearch, AnInfinityThatBecomesNaN) {
  Net net([](const Tensor& x) {
    Tensor y = exp(x * 100.0);
    return y - y;
  });
  NonFiniteSearch search;
  net(ones({1, 3}));
  EXPECT_EQ(search.story(),
            "sub of f32[1, 3], f32[1, 3] in middle (forward) made the first NaN, exp of f32[1, 3] "
            "in middle (forward) made the first infinity");
}

// sqrt is finite at zero, its derivative is not.
TEST(NonFiniteSearch, OpsOfBackwardBelongToTheModuleOfTheirOp) {
  Net net([](const Tensor& x) { return sqrt(x - x); });
  NonFiniteSearch search;
  backward(sum(net(ones({1, 3}))));
  ASSERT_TRUE(search.first_infinity() || search.first_nan()) << search.story();
  const auto& found = search.first_infinity() ? search.first_infinity() : search.first_nan();
  EXPECT_EQ(found->scope, "middle");
  EXPECT_EQ(found->phase, Phase::kBackward);
}

TEST(NonFiniteSearch, WhatWasThereBefore) {
  Net net([](const Tensor& x) { return x; });
  net.parameters()[0].detach().data<float>()[4] = std::numeric_limits<float>::quiet_NaN();
  NonFiniteSearch search;
  net(ones({1, 3}));
  ASSERT_TRUE(search.given_nan());
  EXPECT_EQ(search.evidence(), NonFiniteSearch::Evidence::kNanGiven);
  EXPECT_EQ(search.given_nan()->scope, "first");
  EXPECT_FALSE(search.first_nan());
  EXPECT_NE(search.story().find("no op of this rank made"), std::string::npos);
}

TEST(NonFiniteSearch, HalvesOverflowAndMasksDoNot) {
  NonFiniteSearch search;
  Tensor x = full({4}, 60000.0).to(kF16);
  Tensor low = scalar_tensor(-kInf, kF32);
  Tensor masked = where(gt(ones({4}), 2.0), x.to(kF32), low);
  EXPECT_EQ(search.story(), "") << "a constant is no accident";
  Tensor y = x + x;
  ASSERT_TRUE(search.first_infinity());
  EXPECT_EQ(search.first_infinity()->op, "add");
  EXPECT_FALSE(search.first_nan());
}

// Several ranks find something; the finding that is nearest to where the trouble began is told. An
// op stands for one that communicates: exp makes an infinity of finite operands, log a NaN.
TEST(NonFiniteSearch, WhatCameFromAnotherRankIsWorthLess) {
  using Evidence = NonFiniteSearch::Evidence;
  auto exp_communicates = [](const Primitive& p) { return p.name() == "exp"; };
  auto log_communicates = [](const Primitive& p) { return p.name() == "log"; };
  const Tensor x = full({2}, 1000.0), infinite = full({2}, kInf);
  auto evidence_of = [](auto communicates, auto program) {
    NonFiniteSearch search(communicates);
    program();
    return search.evidence();
  };
  EXPECT_EQ(evidence_of(nullptr, [&] { log(-x); }), Evidence::kNanOfNumbers);
  EXPECT_EQ(evidence_of(nullptr, [&] { log(-exp(x)); }), Evidence::kNanOfOwnInfinity);
  EXPECT_EQ(evidence_of(nullptr, [&] { log(-x / 0.0 + infinite); }), Evidence::kNanOfOwnInfinity);
  EXPECT_EQ(evidence_of(nullptr, [&] { exp(x); }), Evidence::kInfinity);
  EXPECT_EQ(evidence_of(nullptr, [&] { log(-infinite); }), Evidence::kNanOfInfinity);
  EXPECT_EQ(evidence_of(+exp_communicates, [&] { log(-exp(x)); }), Evidence::kNanOfInfinity);
  EXPECT_EQ(evidence_of(+exp_communicates, [&] { exp(x), x / 0.0; }), Evidence::kReceived);
  EXPECT_EQ(evidence_of(+log_communicates, [&] { log(-x); }), Evidence::kReceived);
  EXPECT_EQ(evidence_of(nullptr, [&] { exp(-x); }), Evidence::kNothing);

  NonFiniteSearch search(exp_communicates);
  exp(x);
  EXPECT_FALSE(search.first_infinity());
  EXPECT_EQ(search.story(),
            "an infinity of another rank, or of the sum over ranks, came with exp of f32[2] in no "
            "module (forward)");
}

TEST(NonFiniteSearch, NothingIsFoundInASoundStep) {
  Net net([](const Tensor& x) { return gelu(x); });
  NonFiniteSearch search;
  backward(sum(net(ones({2, 3}))));
  EXPECT_EQ(search.story(), "");
  EXPECT_THROW(NonFiniteSearch again, UserError) << "they do not nest";
}

}  // namespace
}  // namespace tessera::nn
