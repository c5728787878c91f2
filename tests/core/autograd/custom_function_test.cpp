// Functions with a derivative of their own keep it under every transform, in every nesting.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "core/autograd/autograd.h"
#include "core/autograd/transforms.h"
#include "core/ops/compose.h"
#include "core/ops/create.h"
#include "core/ops/layout.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
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

// Rounds; the derivative passes as if it did not (Bengio et al. 2013). `calls` counts forwards.
class StraightThrough final : public CustomFunction {
 public:
  std::string_view name() const override { return "straight_through"; }
  Tensors forward(std::span<const Tensor> in) override { return {round(in[0]) * in[1]}; }
  Tensors vjp(std::span<const Tensor>, std::span<const Tensor> cot) override {
    return {cot[0], cot[0] * 2.0};
  }
};
Tensor straight(const Tensor& x, const Tensor& y) {
  Tensor in[] = {x, y};
  return apply_function(Ref<CustomFunction>(new StraightThrough), in)[0];
}

// x y, with a derivative that is ten times too large, so that its use shows.
class Tenfold final : public CustomFunction {
 public:
  std::string_view name() const override { return "tenfold"; }
  Tensors forward(std::span<const Tensor> in) override {
    save(in[0]), save(in[1]);
    return {in[0] * in[1]};
  }
  Tensors vjp(std::span<const Tensor> saved, std::span<const Tensor> cot) override {
    return {cot[0] * saved[1] * 10.0, cot[0] * saved[0] * 10.0};
  }
};
Tensor tenfold(const Tensor& x, const Tensor& y) {
  Tensor in[] = {x, y};
  return apply_function(Ref<CustomFunction>(new Tenfold), in)[0];
}

TEST(CustomFunctions, KeepTheirDerivativeUnderEveryTransform) {
  Tensor x = values({3, 2}, 1) * 3.0, y = values({2}, 2);
  auto f = [](const Tensor& x, const Tensor& y) { return sum(straight(x, y) * x); };
  Tensor dx = vmap(grad(f), {.in_dims = {0, std::nullopt}})(x, y);
  Tensor dy = vmap(grad<1>(f), {.in_dims = {0, std::nullopt}})(x, y);
  for (int64_t b = 0; b < 3; ++b) {
    expect_close(dx[b], grad(f)(x[b], y));
    expect_close(dy[b], grad<1>(f)(x[b], y));
  }
  // Outside of a vmap: the input without a batch gets the sum.
  auto batch = [&](const Tensor& x, const Tensor& y) {
    return sum(vmap(straight, {.in_dims = {0, std::nullopt}})(x, y));
  };
  expect_close(grad(batch)(x, y), ones({3, 2}, {.dtype = kF64}));
  expect_close(grad<1>(batch)(x, y), full({2}, 6.0, {.dtype = kF64}));
}

// The product of two tensors, which notes which gradients are asked for.
class Noted final : public CustomFunction {
 public:
  explicit Noted(std::vector<std::string>& notes) : notes_(notes) {}
  std::string_view name() const override { return "noted"; }
  Tensors forward(std::span<const Tensor> in) override {
    note("forward");
    save(in[0]), save(in[1]);
    return {in[0] * in[1]};
  }
  Tensors vjp(std::span<const Tensor> saved, std::span<const Tensor> cot) override {
    note("vjp");
    return {wanted(0) ? cot[0] * saved[1] : Tensor(), wanted(1) ? cot[0] * saved[0] : Tensor()};
  }

 private:
  void note(const char* what) {
    notes_.push_back(fmt::format("{} {}{}", what, int(wanted(0)), int(wanted(1))));
  }
  std::vector<std::string>& notes_;
};

TEST(CustomFunctions, KnowWhichGradientsAreWanted) {
  std::vector<std::string> notes;
  const Ref<CustomFunction> f(new Noted(notes));
  Tensor a = tensor({2.0}).requires_grad_(), b = tensor({3.0}).requires_grad_(), c = tensor({5.0});
  const Tensor ac = apply_function(f, {a, c})[0], cb = apply_function(f, {c, b})[0],
               ab = apply_function(f, {a, b})[0], cc = apply_function(f, {c, c})[0];
  backward(ac + cb + ab + cc);  // each call knows its own
  std::ranges::sort(notes);
  EXPECT_EQ(notes, (std::vector<std::string>{"forward 00", "forward 01", "forward 10", "forward 11",
                                             "vjp 01", "vjp 10", "vjp 11"}));
  EXPECT_EQ(a.grad().item<double>(), 8);
  EXPECT_EQ(b.grad().item<double>(), 7);
  notes.clear();
  grad([&](const Tensor& x) { return sum(apply_function(f, {c, x})[0]); })(b.detach());
  EXPECT_EQ(notes, (std::vector<std::string>{"forward 01", "vjp 01"}));
}

TEST(CustomFunctions, AreDifferentiatedByTheirVjpAtEveryLevel) {
  // d/dx = 10 y; d/dy of that is 10, by the vjp's own ops.
  auto f = [](const Tensor& x, const Tensor& y) { return tenfold(x, y); };
  auto outer = grad<1>([&](const Tensor& x, const Tensor& y) { return grad(f)(x, y); });
  EXPECT_EQ(grad(f)(number(2), number(3)).item<double>(), 30);
  EXPECT_EQ(outer(number(2), number(3)).item<double>(), 10);
  // The outer level differentiates the value, which is the inner level's constant.
  auto value = [&](const Tensor& y) {
    return grad([&](const Tensor& x) { return x * tenfold(number(2), y); })(number(5));
  };
  EXPECT_EQ(grad(value)(number(3)).item<double>(), 20);
  auto [z, dz] = jvp(f, std::tuple{number(2), number(3)}, std::tuple{number(1), number(0)});
  EXPECT_EQ(z.item<double>(), 6);
  EXPECT_EQ(dz.item<double>(), 30);
  expect_close(jacfwd(vmap(f, {.in_dims = {0, std::nullopt}}))(vector({1, 2}), number(3)),
               eye(2, 2, {.dtype = kF64}) * 30.0);
}

// exp, which keeps its result instead of its input.
class Exponential final : public CustomFunction {
 public:
  std::string_view name() const override { return "exponential"; }
  Tensors forward(std::span<const Tensor> in) override {
    Tensor y = exp(in[0]);
    save(y);
    return {y};
  }
  Tensors vjp(std::span<const Tensor> saved, std::span<const Tensor> cot) override {
    return {cot[0] * saved[0]};
  }
};
Tensor exponential(const Tensor& x) {
  return apply_function(Ref<CustomFunction>(new Exponential), {&x, 1})[0];
}

TEST(CustomFunctions, AResultThatIsSavedHasItsHistory) {
  auto f = [](const Tensor& x) { return sum(exponential(x)); };
  Tensor x = vector({0, 1}), want = exp(x);
  expect_close(hessian(f)(x), diag(want));
  expect_close(grad([&](const Tensor& x) { return sum(vmap(grad(exponential))(x)); })(x), want);
  expect_close(vmap(grad(grad(exponential)))(x), want);
  Tensor leaf = x.clone().requires_grad_();
  sum(grad(f)(leaf)).backward();
  expect_close(leaf.grad(), want);
  leaf.set_grad({});
  Tensor outputs[] = {f(leaf)}, inputs[] = {leaf};
  Tensor first = grad(outputs, inputs, {}, {.create_graph = true})[0];
  sum(first).backward();
  expect_close(leaf.grad(), want);
}

// sin and cos, each with ten times the other as its derivative, so that its use shows.
class Circle final : public CustomFunction {
 public:
  explicit Circle(bool sine) : sine_(sine) {}
  std::string_view name() const override { return "circle"; }
  Tensors forward(std::span<const Tensor> in) override {
    save(in[0]);
    return {sine_ ? sin(in[0]) : cos(in[0])};
  }
  Tensors vjp(std::span<const Tensor> saved, std::span<const Tensor> cot) override {
    Tensor slope = apply_function(make_ref<Circle>(!sine_), {&saved[0], 1})[0];
    return {cot[0] * slope * (sine_ ? 10.0 : -10.0)};
  }

 private:
  const bool sine_;
};

TEST(CustomFunctions, AVjpMayCallACustomFunction) {
  auto sine = [](const Tensor& x) { return apply_function(make_ref<Circle>(true), {&x, 1})[0]; };
  const Tensor x = vector({0.3, 1}), v = vector({2, -1});
  expect_close(hessian([&](const Tensor& x) { return sum(sine(x)); })(x), diag(sin(x) * -100.0));
  expect_close(vmap(grad(grad(grad(sine))))(x), cos(x) * -1000.0);
  expect_close(jvp(vmap(grad(sine)), x, v).second, sin(x) * v * -100.0);
  Tensor leaf = x.clone().requires_grad_();
  sum(vmap(grad(sine))(leaf)).backward();
  expect_close(leaf.grad(), sin(x) * -100.0);
  NoGrad off;
  EXPECT_FALSE(vmap(grad(sine))(leaf).requires_grad());
}

}  // namespace
}  // namespace tessera
