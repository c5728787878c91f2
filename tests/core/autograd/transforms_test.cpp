// Function transforms against derivatives that are known, against each other and against loops over
// samples, in every nesting that programs use; what is refused, and with which words.
#include "core/autograd/transforms.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <optional>

#include "core/autograd/autocast.h"
#include "core/autograd/autograd.h"
#include "core/ops/compose.h"
#include "core/ops/contract.h"
#include "core/ops/create.h"
#include "core/ops/fused.h"
#include "core/ops/indexing.h"
#include "core/ops/layout.h"
#include "core/ops/linalg.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/update.h"
#include "core/ops/views.h"

namespace tessera {
namespace {

Tensor vector(std::initializer_list<double> v) {
  return from_values<double>(v, {int64_t(v.size())});
}
Tensor number(double v) { return scalar_tensor(v, kF64); }
Tensor values(const Shape& s, uint64_t key) { return sample_values(s, -1, 1, key); }

void expect_close(const Tensor& got, const Tensor& want, double tolerance = 1e-12) {
  ASSERT_EQ(describe(got), describe(want));
  if (want.numel() == 0) return;
  double worst = amax(abs(got.detach() - want.detach())).item<double>();
  EXPECT_LE(worst, tolerance) << to_string(got) << "\ninstead of\n" << to_string(want);
}
void expect_same(const Tensor& got, const Tensor& want) { expect_close(got, want, 0); }

std::string message(const std::function<void()>& f) {
  try {
    f();
  } catch (const UserError& e) {
    return e.what();
  }
  return "nothing was thrown";
}
testing::AssertionResult says(const std::function<void()>& f, const std::string& part) {
  std::string text = message(f);
  if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << text;
}

// ---- grad

TEST(Grad, OfAFunctionOfOneArgument) {
  auto g = grad([](const Tensor& x) { return sum(x * x * x); });
  Tensor x = vector({1, 2, -3}), dx = g(x);
  expect_close(dx, vector({3, 12, 27}));
  EXPECT_FALSE(dx.requires_grad());
  EXPECT_FALSE(x.requires_grad());
}

TEST(Grad, ArgumentsAreChosenByNumberAndMayBeLists) {
  auto f = [](const std::vector<Tensor>& w, const Tensor& x, double scale) {
    return sum(w[0] * x + w[1]) * scale;
  };
  std::vector<Tensor> w{vector({1, 2}), vector({5, 6})};
  Tensor x = vector({3, 4});
  std::vector<Tensor> dw = grad(f)(w, x, 2.0);
  expect_close(dw[0], vector({6, 8}));
  expect_close(dw[1], vector({2, 2}));
  expect_close(grad<1>(f)(w, x, 2.0), vector({2, 4}));
  auto [of_w, of_x] = grad<0, 1>(f)(w, x, 2.0);
  expect_close(of_w[0], dw[0]);
  expect_close(of_x, vector({2, 4}));
  auto [value, both] = value_and_grad(f)(w, x, 2.0);
  EXPECT_EQ(value.item<double>(), 2 * (3 + 8 + 11));
  expect_close(both[1], dw[1]);
}

TEST(Grad, WhatElseAFunctionReturnsIsPassedOn) {
  auto f = [](const Tensor& x) { return std::pair{sum(x * x), x * 2.0}; };
  auto [dx, twice] = grad(f)(vector({1, 2}));
  expect_close(dx, vector({2, 4}));
  expect_close(twice, vector({2, 4}));
  EXPECT_FALSE(twice.requires_grad());
}

TEST(Grad, NestedGivesHigherDerivatives) {
  auto f = [](const Tensor& x) { return x * x * x * x; };
  Tensor x = number(3);
  EXPECT_EQ(grad(f)(x).item<double>(), 4 * 27);
  EXPECT_EQ(grad(grad(f))(x).item<double>(), 12 * 9);
  EXPECT_EQ(grad(grad(grad(f)))(x).item<double>(), 24 * 3);
}

TEST(Grad, InnerVariablesAreNotConfusedWithOuterOnes) {
  // d/dx x (d/dy (x + y)) at y = 1 is 1, not 2 (Siskind, Pearlmutter 2005).
  auto f = [](const Tensor& x) {
    return x * grad([&](const Tensor& y) { return x + y; })(number(1));
  };
  EXPECT_EQ(grad(f)(number(5)).item<double>(), 1);
  // d/dx (x d/dy (x y)) = 2 x.
  auto g = [](const Tensor& x) {
    return x * grad([&](const Tensor& y) { return x * y; })(number(1));
  };
  EXPECT_EQ(grad(g)(number(5)).item<double>(), 10);
}

TEST(Grad, ConstantsAreConstantsAtEveryLevel) {
  auto f = [](const Tensor& x) { return x.detach() * x; };
  EXPECT_EQ(grad(f)(number(3)).item<double>(), 3);
  EXPECT_EQ(grad(grad(f))(number(3)).item<double>(), 0);
  auto g = [](const Tensor& x) {
    Tensor c;
    {
      NoGrad off;
      c = x * x;
    }
    return x * x * x * c;
  };
  EXPECT_EQ(grad(g)(number(2)).item<double>(), 3 * 4 * 4);
  EXPECT_EQ(grad(grad(g))(number(2)).item<double>(), 6 * 2 * 4);
}

TEST(Grad, WorksWithinNoGradAndInferenceMode) {
  auto f = [](const Tensor& x) { return sum(exp(x)); };
  NoGrad off;
  expect_close(grad(f)(vector({0, 1})), vector({1, std::exp(1)}));
  InferenceMode inference;
  expect_close(grad(grad([](const Tensor& x) { return x * x * x; }))(number(2)), number(12));
}

TEST(Grad, ResultsCanBeDifferentiatedByTheTapeOutside) {
  Tensor w = vector({2, 3}).requires_grad_();
  // A gradient penalty: |d/dx sum(w x^2)|^2 = 4 w^2 x^2 at x = (1, 2).
  Tensor x = vector({1, 2});
  Tensor dx = grad([&](const Tensor& x) { return sum(w * x * x); })(x);
  EXPECT_TRUE(dx.requires_grad());
  sum(dx * dx).backward();
  expect_close(w.grad(), vector({8 * 2 * 1, 8 * 3 * 4}));
}

TEST(Grad, ZerosWhereNothingDepends) {
  auto f = [](const Tensor& x, const Tensor&) { return sum(x); };
  expect_close(grad<1>(f)(vector({1}), vector({4, 5})), vector({0, 0}));
  auto constant = [](const Tensor&) { return number(3); };
  expect_close(grad(constant)(vector({4, 5})), vector({0, 0}));
}

TEST(Grad, RefusesWhatHasNoGradient) {
  Tensor x = vector({1, 2});
  EXPECT_TRUE(says([&] { grad([](const Tensor& x) { return x * 2.0; })(x); }, "one float element"));
  EXPECT_TRUE(says([&] { grad([](const Tensor& x) { return sum(cast(x, kF64)); })(arange(0, 3)); },
                   "no float tensor"));
  Tensor w = vector({1, 2}).requires_grad_();
  auto tape = [&](const Tensor& x) {
    Tensor root = sum(w * x);
    return grad({&root, 1}, {&w, 1})[0][0];
  };
  EXPECT_TRUE(says([&] { grad(tape)(x); }, "comes from outside"));
}

TEST(Grad, ProgramsMayLookAtValues) {
  auto f = [](const Tensor& x) { return sum(x).item<double>() > 0 ? sum(x * x) : sum(x); };
  expect_close(grad(f)(vector({1, 2})), vector({2, 4}));
  expect_close(grad(f)(vector({-1, -2})), vector({1, 1}));
}

// ---- vjp, jvp, Jacobians

Tensor curve(const Tensor& x) {
  Tensor a = narrow(x, 0, 0, 2), b = narrow(x, 0, 1, 2);
  return sin(a) * exp(b) + sum(x * x);
}

TEST(Vjp, MayBeCalledAgainAndForSeveralArguments) {
  auto f = [](const Tensor& x, const Tensor& y) { return x * y; };
  auto [z, pullback] = vjp(f, vector({1, 2}), vector({3, 4}));
  expect_close(z, vector({3, 8}));
  for (int i = 0; i < 2; ++i) {
    auto [dx, dy] = pullback(vector({1, 10}));
    expect_close(dx, vector({3, 40}));
    expect_close(dy, vector({1, 20}));
  }
  EXPECT_TRUE(says([&, p = pullback] { p(vector({1})); }, "must be alike"));
}

TEST(Jvp, IsTheDirectionalDerivative) {
  Tensor x = vector({0.3, -0.2, 0.7}), t = vector({1, 2, -1});
  auto [y, dy] = jvp(curve, x, t);
  expect_same(y, curve(x));
  constexpr double h = 1e-5;
  expect_close(dy, (curve(x + t * h) - curve(x - t * h)) / (2 * h), 1e-9);
  auto f = [](const Tensor& a, const Tensor& b) { return std::pair{a * b, b + 1.0}; };
  auto [out, dot] = jvp(f, std::tuple{number(2), number(3)}, std::tuple{number(10), number(100)});
  EXPECT_EQ(out.first.item<double>(), 6);
  EXPECT_EQ(dot.first.item<double>(), 10 * 3 + 2 * 100);
  EXPECT_EQ(dot.second.item<double>(), 100);
}

TEST(Jacobian, ReverseEqualsForward) {
  Tensor x = vector({0.3, -0.2, 0.7});
  Tensor reverse = jacrev(curve)(x), forward = jacfwd(curve)(x);
  EXPECT_EQ(reverse.shape(), (Shape{2, 3}));
  expect_close(forward, reverse);
  auto f = [](const Tensor& a, const Tensor& b) { return tanh(matmul(a, b)); };
  Tensor a = values({2, 3}, 1), b = values({3, 4}, 2);
  Tensor ja = jacrev<1>(f)(a, b);
  EXPECT_EQ(ja.shape(), (Shape{2, 4, 3, 4}));
  expect_close(jacfwd<1>(f)(a, b), ja);
}

TEST(Jacobian, AnArgumentMayBeUndefined) {
  auto f = [](const Tensor& x, const Tensor& mask) {
    return sum(mask.defined() ? x * mask : x * x * x);
  };
  const Tensor x = vector({1, 2}), none;
  expect_close(jacrev(f)(x, none), vector({3, 12}));
  expect_close(jacfwd(f)(x, none), vector({3, 12}));
  expect_close(hessian(f)(x, none), diag(vector({6, 12})));
}

TEST(Jacobian, OfDropoutEmptyTensorsAndOtherDtypes) {
  Tensor x = values({6}, 1) + 2.0, key = default_generator().next_key();
  auto f = [&](const Tensor& x) { return dropout(x * x, 0.5, key); };
  expect_close(jacrev(f)(x), jacfwd(f)(x));
  auto drawn = [](const Tensor& x) { return dropout(x, 0.5); };
  Tensor j = jacrev(drawn)(x), zero_or_two = j * (j - 2.0);
  expect_same(zero_or_two, zeros({6, 6}, {.dtype = kF64}));
  auto twice = [](const Tensor& x) { return x * 2.0; };
  expect_same(jacrev(twice)(zeros({0})), zeros({0, 0}));
  expect_same(jacfwd(twice)(zeros({0})), zeros({0, 0}));
  auto widened = [](const Tensor& x) { return x.to(kF64); };
  expect_same(jacrev(widened)(ones({2})), jacfwd(widened)(ones({2})));
  auto by_integer = [](const Tensor& x, const Tensor& i) { return x * i; };
  EXPECT_TRUE(
      says([&] { jacrev<1>(by_integer)(ones({2}), arange(0, 2)); }, "derivatives are by floats"));
}

TEST(Hessian, OfKnownFunctions) {
  Tensor a = values({3, 3}, 4);
  auto quadratic = [&](const Tensor& x) { return sum(x * matmul(a, x)) * 0.5; };
  expect_close(hessian(quadratic)(values({3}, 5)), (a + transpose(a, 0, 1)) * 0.5);
  auto rosenbrock = [](const Tensor& p) {
    Tensor x = p[0], y = p[1];
    return square(1.0 - x) + 100.0 * square(y - x * x);
  };
  Tensor at = vector({1.2, 0.7});
  expect_close(hessian(rosenbrock)(at),
               from_values<double>({2 - 400 * (0.7 - 3 * 1.44), -480, -480, 200}, {2, 2}), 1e-9);
  expect_close(jacrev(jacrev(rosenbrock))(at), hessian(rosenbrock)(at), 1e-9);
  expect_close(jacfwd(jacfwd(rosenbrock))(at), hessian(rosenbrock)(at), 1e-9);
}

// ---- vmap

TEST(Vmap, BatchDimsInAndOut) {
  auto f = [](const Tensor& x, const Tensor& y) { return matmul(x, y); };
  Tensor x = values({2, 3, 5}, 1), y = values({3, 4}, 2);
  Tensor z = vmap(f, {.in_dims = {2, std::nullopt}, .out_dims = {-1}})(x, y);
  EXPECT_EQ(z.shape(), (Shape{2, 4, 5}));
  for (int64_t b = 0; b < 5; ++b) expect_close(select(z, 2, b), matmul(select(x, 2, b), y));
  // A result that is the same for all samples still has a batch.
  auto constant = vmap([&](const Tensor&) { return y; });
  EXPECT_EQ(constant(x).shape(), (Shape{2, 3, 4}));
}

TEST(Vmap, Nests) {
  auto dot = [](const Tensor& x, const Tensor& y) { return sum(x * y); };
  Tensor x = values({2, 5}, 1), y = values({5, 3}, 2);
  auto outer = vmap(vmap(dot, {.in_dims = {std::nullopt, 1}}), {.in_dims = {0, std::nullopt}});
  expect_close(outer(x, y), matmul(x, y));
}

TEST(Vmap, GradOfVmapAndVmapOfGrad) {
  auto f = [](const Tensor& w, const Tensor& x) { return tanh(sum(w * x)); };
  Tensor w = values({4}, 1), x = values({6, 4}, 2);
  auto batch = vmap(f, {.in_dims = {std::nullopt, 0}});
  Tensor total = grad([&](const Tensor& w) { return sum(batch(w, x)); })(w);
  Tensor each = vmap(grad(f), {.in_dims = {std::nullopt, 0}})(w, x);
  EXPECT_EQ(each.shape(), (Shape{6, 4}));
  expect_close(sum(each, {0}), total);
  for (int64_t b = 0; b < 6; ++b) expect_close(each[b], grad(f)(w, x[b]));
  // The tape outside sees a vmap as ordinary ops.
  Tensor leaf = w.detach().requires_grad_();
  sum(batch(leaf, x)).backward();
  expect_close(leaf.grad(), total);
  // Derivatives of per-sample gradients.
  auto norm2 = [&](const Tensor& w) {
    return sum(square(vmap(grad(f), {.in_dims = {std::nullopt, 0}})(w, x)));
  };
  Tensor by_loop = zeros_like(w);
  for (int64_t b = 0; b < 6; ++b)
    by_loop = by_loop + grad([&](const Tensor& w) { return sum(square(grad(f)(w, x[b]))); })(w);
  expect_close(grad(norm2)(w), by_loop);
}

TEST(Vmap, HessiansOfABatch) {
  auto f = [](const Tensor& x) { return sum(exp(x)) * sum(x); };
  Tensor x = values({3, 2}, 7);
  Tensor h = vmap(hessian(f))(x);
  for (int64_t b = 0; b < 3; ++b) expect_close(h[b], hessian(f)(x[b]));
}

TEST(Vmap, LossesOfSamples) {
  auto f = [](const Tensor& logits, const Tensor& target) { return cross_entropy(logits, target); };
  Tensor x = values({5, 3, 7}, 1), t = sample_integers({5, 3}, 0, 7, 2);
  Tensor g = vmap(grad(f))(x, t);
  for (int64_t b = 0; b < 5; ++b) expect_close(g[b], grad(f)(x[b], t[b]));
  Tensor leaf = x.detach().requires_grad_();
  sum(vmap(f)(leaf, t)).backward();
  expect_close(leaf.grad(), g);
}

TEST(Vmap, Randomness) {
  Tensor x = ones({4, 100}, {.dtype = kF64});
  auto f = [](const Tensor& x) { return dropout(x, 0.5); };
  EXPECT_TRUE(says([&] { vmap(f)(x); }, "Randomness::kDifferent"));
  manual_seed(3);
  Tensor same = vmap(f, {.randomness = Randomness::kSame})(x);
  manual_seed(3);
  Tensor alone = f(x[0]);
  for (int64_t b = 0; b < 4; ++b) expect_same(same[b], alone);
  manual_seed(3);
  Tensor different = vmap(f, {.randomness = Randomness::kDifferent})(x);
  manual_seed(3);
  expect_same(different, f(x));
  EXPECT_FALSE(equal(different[0], different[1]));
  // The backward of a draw meets the same draw.
  for (Randomness r : {Randomness::kSame, Randomness::kDifferent}) {
    manual_seed(3);
    Tensor y = vmap(f, {.randomness = r})(x);
    manual_seed(3);
    expect_same(vmap(grad([&](const Tensor& x) { return sum(f(x)); }), {.randomness = r})(x), y);
  }
  auto noise = [](const Tensor& x) { return x * 0.0 + randn({2}, {.dtype = kF64}); };
  Tensor one = zeros({3, 1}, {.dtype = kF64});
  manual_seed(5);
  Tensor n = vmap(noise, {.randomness = Randomness::kDifferent})(one);
  manual_seed(5);
  expect_same(n, randn({3, 2}, {.dtype = kF64}));
}

TEST(Vmap, EffectsNeedADestinationForEachSample) {
  Tensor shared = zeros({2}, {.dtype = kF64}), x = values({3, 2}, 1);
  EXPECT_TRUE(says(
      [&] {
        vmap([&](const Tensor& x) {
          assign_(shared, x);
          return x;
        })(x);
      },
      "which all samples share"));
  auto own = [](const Tensor& x) {
    Tensor y = zeros_like(x) + x;
    add_(y, x);
    return y;
  };
  expect_close(vmap(own)(x), x * 2.0);
  vmap([&](const Tensor& x) {
    add_(shared, ones({2}, {.dtype = kF64}));
    return x;
  })(x);
  expect_close(shared, vector({1, 1}));  // once, not for each sample
}

// What a vjp keeps as a shape only has no values to take a sample of.
TEST(Vmap, OfOneSampleWithinAndWithout) {
  auto sums = [](const Tensor& x) { return logsumexp(x * x, {-1}); };
  auto norms = [](const Tensor& x) { return x * norm(x, 2, {-1}, true); };
  const Tensor x = values({1, 3}, 1), one = values({1, 1}, 2);
  expect_close(vmap(jacfwd(norms))(x), unsqueeze(jacrev(norms)(x[0]), 0));
  expect_close(vmap(jacrev(jacrev(sums)))(x), unsqueeze(hessian(sums)(x[0]), 0));
  expect_close(vmap(jacfwd(norms))(one), unsqueeze(jacrev(norms)(one[0]), 0));
  auto columns = vmap(vmap(jacfwd(norms)), {.in_dims = {1}, .out_dims = {1}});
  const Tensor cube = values({1, 1, 3}, 3);
  expect_close(columns(cube), reshape(jacrev(norms)(cube[0][0]), {1, 1, 3, 3}));
}

TEST(Vmap, OfNoSamples) {
  const Tensor none = zeros({0, 3}, {.dtype = kF64}), w = values({3, 2}, 1);
  auto f = [](const Tensor& x, const Tensor& w) { return softmax(matmul(tanh(x), w)); };
  auto batched = vmap(f, {.in_dims = {0, std::nullopt}, .out_dims = {1}});
  expect_same(batched(none, w), zeros({2, 0}, {.dtype = kF64}));
  auto total = [&](const Tensor& x, const Tensor& w) { return sum(batched(x, w)); };
  expect_same(grad<1>(total)(none, w), zeros_like(w));
  auto row = vmap([](const Tensor& x) { return x * x; });
  expect_same(vmap(row)(zeros({4, 0})), zeros({4, 0}));
  expect_same(vmap(row)(zeros({0, 4})), zeros({0, 4}));
  Tensor p = clone(w).requires_grad_();
  total(none, p).backward();
  expect_same(p.grad(), zeros_like(w));
}

TEST(Vmap, OneHotOfEachSample) {
  const Tensor classes = from_values<int64_t>({2, 0, 1, 2}, {2, 2});
  auto f = [](const Tensor& c) { return one_hot(c, 3); };
  expect_same(vmap(f)(classes), one_hot(classes, 3));
  expect_same(vmap(vmap(f))(classes), one_hot(classes, 3));
  EXPECT_THROW(vmap(f)(classes + 1), UserError);
}

TEST(Vmap, Refusals) {
  auto f = [](const Tensor& x, const Tensor& y) { return x + y; };
  Tensor x = values({3, 2}, 1), y = values({4, 2}, 2);
  EXPECT_TRUE(says([&] { vmap(f, {.in_dims = {0}})(x, y); }, "1 entries for 2 arguments"));
  EXPECT_TRUE(says([&] { vmap(f)(x, y); }, "3 (argument 0), 4 (argument 1)"));
  EXPECT_TRUE(says([&] { vmap(f, {.in_dims = {2, 0}})(x, y); }, "in_dims[0] is 2"));
  EXPECT_TRUE(says(
      [&] {
        vmap(f, {.in_dims = {std::nullopt, std::nullopt}})(x, y);
      },
      "no argument"));
  EXPECT_TRUE(says([&] { vmap(f, {.out_dims = {3}})(x, x); }, "out_dims[0] is 3"));
  EXPECT_TRUE(says([&] { vmap([](const Tensor& x) { return x * sum(x).item<double>(); })(x); },
                   "inside a vmap"));
  Tensor kept;
  vmap([&](const Tensor& x) { return kept = x; })(x);
  EXPECT_TRUE(says([&] { grad([&](const Tensor& t) { return sum(t * kept); })(x[0]); },
                   "a function transform that is over"));
}

// ---- where levels meet other scopes

TEST(Levels, AutocastInsideAFunction) {
  Tensor w = values({3, 3}, 1).to(kF32);
  auto plain = [](const Tensor& w) {
    Tensor low = w.to(kBF16), y = matmul(low, low);
    return sum(y * y).to(kF32);
  };
  auto cast = [](const Tensor& w) {
    Autocast scope(kBF16);
    Tensor y = matmul(w, w);
    return sum((y * y).to(kBF16)).to(kF32);
  };
  Tensor h = hessian(cast)(w);
  EXPECT_GT(amax(abs(h)).item<float>(), 1);
  expect_close(h, hessian(plain)(w), 0.25);
  Tensor parameter = w.clone().requires_grad_();
  auto loss = [&](const Tensor& x) {
    Autocast scope(kBF16);
    return sum(matmul(x, parameter)).to(kF32);
  };
  Tensor losses = vmap(loss)(ones({2, 4, 3}));
  ASSERT_TRUE(losses.requires_grad());
  sum(losses).backward();
  expect_same(parameter.grad(), full({3, 3}, 8.0));
}

TEST(Levels, TensorsOfAFunctionThatReturnedAreRefused) {
  Tensor x = values({3, 2}, 1), w = vector({1, 2}).requires_grad_(), kept;
  auto f = [&](const Tensor& x) {
    kept = sum(w * w);
    return sum(w * x);
  };
  Tensor y = vmap(f)(x);
  EXPECT_TRUE(says([&] { sum(y) + kept; }, "belongs to a function transform that is over"));
  grad(f)(x[0]);
  EXPECT_TRUE(says([&] { kept * 2.0; }, "return the tensor from the function"));
}

TEST(Levels, ClampPassesNanUnderEveryTransform) {
  Tensor x = vector({NAN, 1, 5}), low = vector({0, 2, 0}), high = vector({3, 3, 3});
  auto f = [&](const Tensor& low) { return sum(clamp(x, low, high)); };
  expect_same(grad(f)(low), vector({0, 1, 0}));
  auto by_sample = [](const Tensor& x, const Tensor& low, const Tensor& high) {
    return clamp(x, low, high);
  };
  auto batched = [&](const Tensor& low) { return sum(vmap(by_sample)(x, low, high)); };
  expect_same(grad(batched)(low), vector({0, 1, 0}));
}

TEST(Trees, StructsMapsAndOptionalsHoldTensors) {
  Tensor x = values({4, 3, 3}, 1);
  linalg::QR batch = vmap([](const Tensor&a) { return linalg::qr(a); })(x), whole = linalg::qr(x);
  expect_close(batch.q, whole.q);
  expect_close(batch.r, whole.r);
  using Dictionary = std::map<std::string, Tensor>;
  Dictionary d{{"w", x}};
  expect_same(vmap([](const Dictionary& d) { return sum(d.at("w")); })(d), sum(x, {1, 2}));
  auto sum_of = [](const std::optional<Tensor>& t) { return sum(*t * *t); };
  expect_same(*grad(sum_of)(std::optional<Tensor>(x)), x * 2.0);
}

}  // namespace
}  // namespace tessera
