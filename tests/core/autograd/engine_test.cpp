// Cases that a backward must handle: another backward inside of it, nodes of another thread, shared
// gradients, and gradients that a user's function makes.
#include <gtest/gtest.h>

#include <thread>

#include "core/autograd/autograd.h"
#include "core/autograd/transforms.h"
#include "core/dispatch/context.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "core/optim/clip.h"
#include "tests/support/checkpointed.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using List = std::vector<Tensor>;

Tensor leaf(std::initializer_list<double> values) {
  return from_values<double>(values, {int64_t(values.size())}).requires_grad_();
}
std::vector<double> numbers(const Tensor& t) {
  if (!t.defined()) return {};
  Tensor dense = contiguous(t.detach());
  return {dense.values<double>(), dense.values<double>() + t.numel()};
}
using Numbers = std::vector<double>;

// A function made of two lambdas.
class Function final : public CustomFunction {
 public:
  using Body = std::function<Tensors(std::span<const Tensor>)>;
  Function(Body forward, Body vjp) : forward_(std::move(forward)), vjp_(std::move(vjp)) {}
  std::string_view name() const override { return "halves"; }
  Tensors forward(std::span<const Tensor> in) override {
    for (const Tensor& t : in) save(t);
    return forward_(in);
  }
  Tensors vjp(std::span<const Tensor> saved, std::span<const Tensor> cot) override {
    Tensors all(saved.begin(), saved.end());
    for (const Tensor& t : cot) all.push_back(t);
    return vjp_(all);
  }

 private:
  Body forward_, vjp_;
};
Tensor apply(Function::Body forward, Function::Body vjp, const List& in) {
  return apply_function(make_ref<Function>(std::move(forward), std::move(vjp)), in)[0];
}

TEST(Engine, ABackwardInAHookLeavesTheOuterOneWhole) {
  Tensor a = leaf({2}), b = leaf({3});
  Tensor h = b * b, loss = sum(h * a), inner;
  add_hook(a, [&](const Tensor&) {
    EnableGrad on;
    Tensor q = sum(h * 3.0);
    inner = grad({{q}}, {{b}}, {}, {.retain_graph = true})[0];
    return Tensor();
  });
  backward(loss, {}, {.retain_graph = true});
  EXPECT_EQ(numbers(a.grad()), Numbers{9});
  EXPECT_EQ(numbers(b.grad()), Numbers{12});
  EXPECT_EQ(numbers(inner), Numbers{18});
}

TEST(Engine, ABackwardInAFunctionAddsToWhatIsOnItsWay) {
  Tensor w = leaf({2}), x = leaf({3});
  backward(sum(checkpointed(x * w, [&](const Tensor& t) { return t * w; })));
  EXPECT_EQ(numbers(w.grad()), Numbers{12}) << "w is read inside and outside";
  EXPECT_EQ(numbers(x.grad()), Numbers{4});
  // The other way round, and one inside the other.
  w.set_grad({}), x.set_grad({});
  auto cube = [&](const Tensor& t) {
    return checkpointed(t * w, [&](const Tensor& u) { return u * w; }) * w;
  };
  backward(sum(w * checkpointed(x, cube) + w * x));
  EXPECT_EQ(numbers(w.grad()), Numbers{4 * 8 * 3 + 3});
  EXPECT_EQ(numbers(x.grad()), Numbers{16 + 2});
}

TEST(Engine, AnInnerBackwardThatFailsLeavesTheOuterOneWhole) {
  Tensor a = leaf({2}), b = leaf({3});
  Tensor h = b * b, loss = sum(h * a), seen;
  auto bad = [](auto) -> Tensors { throw UserError("no derivative today"); };
  Tensor q = sum(apply([](auto in) { return Tensors{in[0] * 1.0}; }, bad, {h * a}));
  add_hook(a, [&](const Tensor&) {
    EXPECT_EQ(error_of([&] { backward(q, {}, {.retain_graph = true}); }), "no derivative today");
    return Tensor();
  });
  backward(loss);
  EXPECT_EQ(numbers(b.grad()), Numbers{12});
}

TEST(Engine, SinksHearOfTheOutermostBackward) {
  struct Sink final : GradSink {
    void deliver(int slot, Tensor g) override { heard += std::to_string(slot), got.push_back(g); }
    void backward_finished() override { heard += "|"; }
    void backward_abandoned(const std::string&) override { heard += "!"; }
    std::string heard;
    List got;
  };
  Tensor w = leaf({2}), v = leaf({5}), x = leaf({3});
  Sink sink;
  grad_meta(w)->sink = &sink, grad_meta(w)->slot = 1;
  grad_meta(v)->sink = &sink, grad_meta(v)->slot = 2;
  backward(sum(checkpointed(x * v, [&](const Tensor& t) { return t * w; })));
  EXPECT_EQ(sink.heard, "12|");
  EXPECT_EQ(numbers(sink.got.at(0)), Numbers{15});
  EXPECT_EQ(numbers(sink.got.at(1)), Numbers{6});
  auto fails = [&](const Tensor& t) -> Tensor {
    if (context().phase == Phase::kForward) return t * w;
    backward(sum(w * 1.0));
    throw UserError("no derivative today");
  };
  EXPECT_EQ(error_of([&] { backward(sum(checkpointed(x * v, fails))); }), "no derivative today");
  EXPECT_EQ(sink.heard, "12|1!");
}

TEST(Engine, ThreadsMayMakeOneGraph) {
  for (bool retain : {false, true}) {
    Tensor w = leaf({3}), a;
    for (int i = 0; i < 50; ++i) Tensor junk = w * 1.0;  // this thread's numbers run ahead
    Tensor h = w * w;
    std::thread([&] { a = h * 2.0; }).join();
    backward(sum(a + h), {}, {.retain_graph = retain});
    EXPECT_EQ(numbers(w.grad()), Numbers{18});
    // A custom function's node, too.
    w.set_grad({});
    Tensor k = w * w;
    std::thread([&] {
      a = apply([](auto in) { return Tensors{in[0] * 2.0}; },
                [](auto all) { return Tensors{all[1] * 2.0}; }, {k});
    }).join();
    backward(sum(a + k), {}, {.retain_graph = retain});
    EXPECT_EQ(numbers(w.grad()), Numbers{18});
  }
}

TEST(Engine, RecordedGradientsAreEachLeafsOwn) {
  Tensor a = leaf({1, 1}), b = leaf({1, 1}), c = leaf({3, 3});
  backward(sum((a + b) * c), {}, {.create_graph = true});
  optim::clip_grad_norm_(List{a, b}, 1.0);
  EXPECT_NEAR(numbers(a.grad())[0], 0.5, 1e-6) << "scaled once";
  EXPECT_NEAR(numbers(b.grad())[1], 0.5, 1e-6);
  // An expanded one.
  a.set_grad({}), b.set_grad({});
  backward(sum(a + b), {}, {.create_graph = true});
  optim::clip_grad_norm_(List{a, b}, 1.0);
  EXPECT_NEAR(numbers(a.grad())[0], 0.5, 1e-6);
  // The user's own.
  Tensor g = from_values<double>({4, 5}, {2});
  c.set_grad({});
  backward(c, g, {.create_graph = true});
  {
    NoGrad off;
    mul_(c.grad(), 2.0);
  }
  EXPECT_EQ(numbers(g), (Numbers{4, 5}));
  EXPECT_EQ(numbers(c.grad()), (Numbers{8, 10}));
}

TEST(Engine, RecordedGradientsKeepTheirHistory) {
  Tensor a = leaf({2, 3}), b = leaf({5, 7});
  backward(sum((a + b) * (a + b) * a), {}, {.create_graph = true});  // (a + b)^2 a
  Tensor second = grad({{sum(b.grad())}}, {{a}})[0];                 // 2 (a + b) + 2 a
  EXPECT_EQ(numbers(second), (Numbers{18, 26}));
  for (const Tensor& leaf : {a, b}) leaf.set_grad({});  // its history leads back to the leaf
}

TEST(Engine, GradientsOfCustomFunctionsAreChecked) {
  auto twice = [](auto in) { return Tensors{in[0] * 2.0}; };
  auto gradient_of = [&](const Tensor& x, const std::function<Tensor(const Tensor&)>& vjp) {
    backward(sum(apply(twice, [&](auto all) { return Tensors{vjp(all[1])}; }, {x * 2.0})));
    return x.grad();
  };
  auto refused = [&](const std::function<Tensor(const Tensor&)>& vjp) {
    return error_of([&] { gradient_of(leaf({1, 1, 1}), vjp); });
  };
  EXPECT_EQ(refused([](const Tensor& c) { return sum(c); }),
            "halves: vjp returned f64[] cpu as the gradient of input 0, f64[3] cpu");
  EXPECT_EQ(refused([](const Tensor& c) { return expand(sum(c, {0}, true), {9}); }),
            "halves: vjp returned f64[9] cpu as the gradient of input 0, f64[3] cpu");
  EXPECT_EQ(refused([](const Tensor& c) { return cast(c, kI64); }),
            "halves: vjp returned i64[3] cpu as the gradient of input 0, f64[3] cpu");
  // What the input would be broadcast to is summed, another precision is brought to the input's.
  Tensor x = leaf({1, 1, 1});
  Tensor g = gradient_of(x, [](const Tensor& c) { return cast(expand(c, {2, 3}), kF32); });
  EXPECT_EQ(numbers(g), (Numbers{4, 4, 4}));
  // A gradient of an input that requires none is dropped, whatever its shape.
  Tensor plain = from_values<double>({1, 1, 1}, {3}), w = leaf({1, 2, 3});
  backward(sum(apply([](auto in) { return Tensors{in[0] * in[1]}; },
                     [](auto all) {
                       return Tensors{sum(all[2]), all[2] * all[0]};
                     },
                     {plain, w})));
  EXPECT_EQ(numbers(w.grad()), (Numbers{1, 1, 1}));
}

TEST(Engine, GradientsOfCustomFunctionsAreCheckedPerSample) {
  auto f = [](const Tensor& x) {
    return apply([](auto in) { return Tensors{in[0] * 2.0}; },
                 [](auto all) {
                   return Tensors{expand(all[1], {2, 3})};
                 },
                 {x});
  };
  Tensor x = from_values<double>({1, 2, 3, 4, 5, 6}, {2, 3}).requires_grad_();  // a batch of two
  backward(sum(vmap(f)(x)));
  EXPECT_EQ(numbers(x.grad()), Numbers(6, 2)) << "each sample's summed over its own rows";
}

TEST(Engine, GradientsOfHooksAndOfSetGradAreChecked) {
  Tensor x = leaf({1, 2, 3});
  int hook = add_hook(x, [](const Tensor& g) { return sum(g); });
  EXPECT_EQ(error_of([&] { backward(sum(x * 2.0)); }),
            "add_hook: a hook returned f64[] cpu for a gradient f64[3] cpu; it must keep shape, "
            "dtype and device");
  EXPECT_FALSE(x.grad().defined());
  remove_hook(x, hook);
  hook = add_hook(x, [](const Tensor& g) { return cast(g, kF32); });
  EXPECT_NE(error_of([&] { backward(sum(x * 2.0)); }).find("returned f32[3]"), std::string::npos);
  remove_hook(x, hook);
  EXPECT_EQ(error_of([&] { x.set_grad(ones({5}, {.dtype = kF64})); }),
            "set_grad: f64[5] cpu is no gradient of f64[3] cpu; it must have its shape, dtype and "
            "device");
  EXPECT_NE(error_of([&] { x.set_grad(ones({3})); }).find("f32[3]"), std::string::npos);
  x.set_grad(ones({3}, {.dtype = kF64}));
  EXPECT_EQ(numbers(x.grad()), (Numbers{1, 1, 1}));
}

TEST(Engine, AnUpdateOfALeafIsRefused) {
  Tensor w = leaf({1, 2}), x = zeros({2}, {.dtype = kF64});
  const std::string why =
      "assign_: a leaf that requires grad is changed in place: f64[2] cpu; open a NoGrad scope "
      "around the update of a parameter, or compute a new tensor (x = x + y; where, cat, stack or "
      "index_put for a part of it)";
  EXPECT_EQ(error_of([&] { assign_(w, x); }), why);
  EXPECT_EQ(error_of([&] { assign_(w, w * 2.0); }), why);
  EXPECT_EQ(error_of([&] { add_(w, x); }), why);
  EXPECT_EQ(numbers(w), (Numbers{1, 2})) << "nothing was written";
  add_(x, w.detach());
  {
    NoGrad off;
    add_(x, w * 2.0);
  }
  EXPECT_FALSE(x.requires_grad());
  EXPECT_EQ(numbers(x), (Numbers{3, 6}));
}

}  // namespace
}  // namespace tessera
