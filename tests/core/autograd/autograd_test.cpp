// Recording and backward: what is recorded, when, what is refused and with which words.
#include "core/autograd/autograd.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/ops/create.h"
#include "core/ops/indexing.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/sort.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "tests/support/unreliable.h"

namespace tessera {
namespace {

using List = std::vector<Tensor>;

Tensor leaf(std::initializer_list<double> values) {
  Tensor t = from_values<double>(values, {int64_t(values.size())});
  t.requires_grad_();
  return t;
}
double number(const Tensor& t, int64_t i = 0) { return contiguous(t.detach()).data<double>()[i]; }

template <class E = UserError>
std::string message(const std::function<void()>& f) {
  try {
    f();
  } catch (const E& e) {
    return e.what();
  }
  return "nothing was thrown";
}
bool mentions(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Autograd, NothingIsRecordedUnderNoGrad) {
  Tensor x = leaf({2, 3});
  {
    NoGrad off;
    EXPECT_FALSE(grad_enabled());
    EXPECT_FALSE((x * x).requires_grad());
    EnableGrad on;
    EXPECT_TRUE((x * x).requires_grad());
  }
  EXPECT_TRUE(grad_enabled());
  EXPECT_TRUE((x * x).requires_grad());
  EXPECT_FALSE(x.detach().requires_grad());
}

TEST(Autograd, InferenceTensorsCannotBeRecordedLater) {
  Tensor y;
  {
    InferenceMode mode;
    y = ones({2}, {.dtype = kF64}) * 2.0;
  }
  Tensor x = leaf({1, 2});
  std::string text = message([&] { x* y; });
  EXPECT_TRUE(mentions(text, "inference mode") && mentions(text, "clone")) << text;
  text = message([&] { Tensor(y).requires_grad_(); });
  EXPECT_TRUE(mentions(text, "inference mode")) << text;
  Tensor view = slice(y, 0, 0, 1);
  EXPECT_TRUE(mentions(message([&] { expand(view, {2}) * x; }), "inference mode"));
  EXPECT_TRUE((x * clone(y)).requires_grad());
}

TEST(Autograd, OnlyFloatsRequireGrad) {
  EXPECT_TRUE(mentions(message([] { arange(0, 3).requires_grad_(); }), "has no gradients"));
  Tensor x = leaf({1, 2});
  EXPECT_FALSE(gt(x, 1).requires_grad());
  EXPECT_FALSE(argmax(x).requires_grad());
  EXPECT_TRUE(mentions(message([&] { Tensor(x * 2.0).requires_grad_(false); }), "not a leaf"));
  x.requires_grad_(false);
  EXPECT_FALSE((x * 2.0).requires_grad());
}

TEST(Autograd, SecondBackwardNeedsRetainGraph) {
  Tensor x = leaf({1, 2}), y = sum(x * x);
  backward(y);
  std::string text = message([&] { backward(y); });
  EXPECT_TRUE(mentions(text, "released") && mentions(text, "retain_graph")) << text;
  Tensor z = sum(x * x);
  backward(z, {}, {.retain_graph = true});
  backward(z);
  EXPECT_DOUBLE_EQ(number(x.grad(), 1), 3 * 4.0);  // three backwards add up
}

TEST(Autograd, RootsAreChecked) {
  Tensor x = leaf({1, 2});
  EXPECT_TRUE(mentions(message([&] { backward(x * 2.0); }), "reduce it to one element"));
  EXPECT_TRUE(mentions(message([&] { backward(ones({})); }), "no history"));
  EXPECT_TRUE(
      mentions(message([&] { backward(x * 2.0, ones({3}, {.dtype = kF64})); }), "its gradient"));
  backward(x * 2.0, from_values<double>({1, 10}, {2}));
  EXPECT_DOUBLE_EQ(number(x.grad(), 1), 20);
}

TEST(Autograd, CreateGraphDifferentiatesTwiceAndThrice) {
  Tensor x = leaf({3}), y = sum(x * x * x * x);
  Tensor g = grad(List{y}, List{x}, {}, {.create_graph = true})[0];
  EXPECT_DOUBLE_EQ(number(g), 4 * 27);
  Tensor h = grad(List{sum(g)}, List{x}, {}, {.create_graph = true})[0];
  EXPECT_DOUBLE_EQ(number(h), 12 * 9);
  EXPECT_DOUBLE_EQ(number(grad(List{sum(h)}, List{x})[0]), 24 * 3);
}

TEST(Autograd, DoubleBackwardThroughAGradientPenalty) {
  // d/dw of |d/dx sum(tanh(w x))|^2 = d/dw sum((w (1 - tanh^2(w x)))^2), at w = 0.5, x = 2.
  Tensor w = leaf({0.5}), x = leaf({2});
  Tensor g = grad(List{sum(tanh(w * x))}, List{x}, {}, {.create_graph = true})[0];
  backward(sum(square(g)));
  double t = std::tanh(1.0), s = 1 - t * t;
  EXPECT_NEAR(number(w.grad()), 2 * 0.5 * s * (s + 0.5 * -2 * t * s * 2), 1e-14);
}

TEST(Autograd, GradOfNonLeafAndUnreached) {
  Tensor x = leaf({1, 2}), other = leaf({1}), middle = x * 3.0, y = sum(middle * middle);
  Tensors g = grad(List{y}, List{middle, x, other});
  EXPECT_DOUBLE_EQ(number(g[0], 1), 12);
  EXPECT_DOUBLE_EQ(number(g[1], 1), 36);
  EXPECT_FALSE(g[2].defined());
  EXPECT_FALSE(x.grad().defined()) << "grad() accumulates nothing";
  EXPECT_TRUE(
      mentions(message([&] { grad(List{sum(x)}, List{ones({1})}); }), "does not require grad"));
}

TEST(Autograd, LeavesAccumulateWithoutSharingMemory) {
  Tensor x = leaf({1, 2});
  backward(sum(x * 1.0));
  Tensor first = x.grad();
  backward(sum(x * 2.0));
  EXPECT_DOUBLE_EQ(number(x.grad()), 3);
  Tensor seed = from_values<double>({5, 6}, {2}), y = leaf({0, 0});
  backward(y + 0.0, seed);  // the gradient that arrives is the caller's own tensor
  backward(sum(y * 1.0));
  EXPECT_DOUBLE_EQ(number(seed), 5);
  EXPECT_DOUBLE_EQ(number(y.grad()), 6);
}

TEST(Autograd, AnOpWithoutGradientDoesNotCutOffOthers) {
  Tensor x = leaf({0.25, -2});
  Tensor scaled = x * 2.0;
  backward(sum(scaled + sign(x * 3.0) + floor(scaled * 5.0)));
  EXPECT_DOUBLE_EQ(number(x.grad(), 0), 2);
  // Along every path at once: a leaf that only zeros reach gets none.
  Tensor y = leaf({1.5});
  backward(sum(sign(y * 2.0)));
  EXPECT_FALSE(y.grad().defined() && number(y.grad()) != 0);
}

TEST(Autograd, RootsThatShareAGraph) {
  Tensor x = leaf({2}), a = x * x, b = a * x;
  backward(List{a, b}, List{});
  EXPECT_DOUBLE_EQ(number(x.grad()), 4 + 12);
}

TEST(Autograd, ManyResults) {
  Tensor x = leaf({1, 2, 3, 4, 5});
  Tensors parts = split(x, {1, 2, 2});
  backward(sum(parts[1] * parts[1]));  // the first and last part get nothing
  EXPECT_DOUBLE_EQ(number(x.grad(), 0), 0);
  EXPECT_DOUBLE_EQ(number(x.grad(), 2), 6);
  EXPECT_DOUBLE_EQ(number(x.grad(), 4), 0);
  Tensor y = leaf({3, 1, 2});
  backward(sum(sort(y).values * from_values<double>({1, 10, 100}, {3})));
  EXPECT_DOUBLE_EQ(number(y.grad(), 0), 100);
  EXPECT_DOUBLE_EQ(number(y.grad(), 2), 10);
}

TEST(Autograd, HooksSeeAndReplaceWholeGradients) {
  Tensor x = leaf({1, 2});
  int calls = 0;
  int first = add_hook(x, [&](const Tensor& g) {
    ++calls;
    EXPECT_DOUBLE_EQ(number(g), 5) << "the sum over both uses";
    return g * 2.0;
  });
  add_hook(x, [&](const Tensor& g) {
    EXPECT_DOUBLE_EQ(number(g), 10) << "hooks run in order";
    return Tensor();
  });
  backward(sum(x * 2.0 + x * 3.0));
  EXPECT_EQ(calls, 1);
  EXPECT_DOUBLE_EQ(number(x.grad()), 10);
  remove_hook(x, first);
  EXPECT_TRUE(mentions(message([&] { add_hook(x * 2.0, [](const Tensor&) { return Tensor(); }); }),
                       "not a leaf"));
}

TEST(Autograd, HookNumbersAreNotGivenAgain) {
  Tensor x = leaf({1});
  int first = add_hook(x, [](const Tensor& g) { return g * 2.0; });
  remove_hook(x, first);
  int second = add_hook(x, [](const Tensor& g) { return g * 3.0; });
  remove_hook(x, first);  // once more: removes nothing
  EXPECT_NE(first, second);
  backward(sum(x));
  EXPECT_DOUBLE_EQ(number(x.grad()), 3);
}

class Collector final : public GradSink {
 public:
  void deliver(int slot, Tensor g) override { got.emplace_back(slot, g); }
  void backward_finished() override { ++finished; }
  void backward_abandoned(const std::string& text) override { ++abandoned, why = text; }
  void cleared(int slot) override { taken_away.push_back(slot); }
  void grad_finished(const std::string& failure) override { ++walked, why = failure; }
  std::vector<std::pair<int, Tensor>> got;
  std::vector<int> taken_away;
  int finished = 0, abandoned = 0, walked = 0;
  std::string why;
};

TEST(Autograd, SinksHearOfABackwardThatFailed) {
  bool fails = true;
  Tensor early = leaf({1, 2}), late = leaf({3});
  Collector sink, idle;
  grad_meta(late)->sink = &sink, grad_meta(early)->sink = &idle;
  auto loss = [&] {
    Tensor x = apply_function(make_ref<Unreliable>(fails), List{early})[0];
    return sum(x * late);
  };
  EXPECT_TRUE(mentions(message([&] { backward(loss()); }), "no derivative today"));
  EXPECT_EQ(sink.abandoned, 1);
  EXPECT_EQ(sink.finished, 0);
  EXPECT_EQ(idle.abandoned, 1) << "others may wait for what will not arrive there";
  EXPECT_TRUE(mentions(idle.why, "no derivative today")) << idle.why;
  fails = false;
  backward(loss());
  EXPECT_EQ(sink.abandoned, 1);
  EXPECT_EQ(sink.finished, 1);
  EXPECT_EQ(idle.finished, 1);
  EXPECT_DOUBLE_EQ(number(idle.got.at(0).second), 3);
}

TEST(Autograd, SinksHearOfGradAndOfClearedGradients) {
  Tensor x = leaf({2, 3});
  Collector sink;
  grad_meta(x)->sink = &sink, grad_meta(x)->slot = 4;
  EXPECT_DOUBLE_EQ(number(grad({{sum(x * x)}}, {{x}})[0], 1), 6);
  EXPECT_EQ(sink.walked, 1);
  EXPECT_EQ(sink.why, "");
  EXPECT_EQ(sink.finished + sink.abandoned + int(sink.got.size()), 0);
  x.set_grad(x.detach());
  EXPECT_TRUE(sink.taken_away.empty());
  x.set_grad({});
  EXPECT_EQ(sink.taken_away, std::vector<int>{4});
}

// What stands in the program for a leaf of the graph.
TEST(Autograd, GradOfALeafThatAnotherStandsFor) {
  struct Doubling final : GradSink {
    explicit Doubling(const Tensor& t) : seen(t) {}
    void deliver(int, Tensor) override {}
    void backward_finished() override {}
    void backward_abandoned(const std::string&) override {}
    GradMeta* known_as(int) override { return grad_meta(seen); }
    Tensor converted(int, Tensor g) override { return g * 2.0; }
    Tensor seen;
  };
  Tensor seen = leaf({1}), used = leaf({5});
  Doubling sink(seen);
  grad_meta(used)->sink = &sink;
  EXPECT_DOUBLE_EQ(number(grad({{sum(used * 3.0)}}, {{seen}})[0]), 6);
  EXPECT_DOUBLE_EQ(number(grad({{sum(used * 3.0) + sum(seen)}}, {{seen}})[0]), 7);
}

TEST(Autograd, ATiedLeafIsDeliveredOnceToItsSink) {
  Tensor table = leaf({1, 2, 3}), other = leaf({4});
  Collector sink;
  for (auto& [t, slot] : std::vector<std::pair<Tensor, int>>{{table, 7}, {other, 3}})
    grad_meta(t)->sink = &sink, grad_meta(t)->slot = slot;
  Tensor rows = index_select(table, 0, from_values<int64_t>({0, 0, 2}, {3}));
  backward(sum(rows * other) +
           sum(table * 10.0));  // used at both ends, as an embedding and its head are
  ASSERT_EQ(sink.got.size(), 2u);
  for (auto& [slot, g] : sink.got) {
    EXPECT_TRUE(slot == 7 || slot == 3);
    EXPECT_DOUBLE_EQ(number(g, 0), slot == 7 ? 18 : 5);
  }
  EXPECT_EQ(sink.finished, 1);
  EXPECT_FALSE(table.grad().defined()) << "what a sink takes is not accumulated";
}

TEST(Autograd, OverwrittenSavedTensorIsNamed) {
  Tensor x = leaf({1, 2}), w = from_values<double>({3, 4}, {2});
  Tensor y = sum(x * w);
  fill_(w, 0.0);
  std::string text = message([&] { backward(y); });
  EXPECT_TRUE(mentions(
      text, "mul: input 1 (f64[2] cpu) was overwritten after it was saved for backward; copy it"))
      << text;
  Tensor e = exp(x), z = sum(e);
  {
    NoGrad off;
    mul_(e.detach(), 2.0);
  }
  text = message([&] { backward(z); });
  EXPECT_TRUE(mentions(text, "exp: result 0")) << text;
  // What backward does not read may be written.
  Tensor s = x + w;
  fill_(w, 7.0);
  backward(sum(s));
  EXPECT_DOUBLE_EQ(number(x.grad()), 1);
}

TEST(Autograd, WritingARecordedTensorIsRefused) {
  Tensor x = leaf({1, 2});
  EXPECT_TRUE(mentions(message([&] { fill_(x, 0.0); }), "NoGrad"));
  NoGrad off;
  fill_(x, 0.5);
  EXPECT_DOUBLE_EQ(number(x), 0.5);
}

// y = x^3 with a derivative written by hand.
class Cube final : public CustomFunction {
 public:
  std::string_view name() const override { return "cube"; }
  Tensors forward(std::span<const Tensor> in) override {
    EXPECT_FALSE(grad_enabled());
    save(in[0]);
    return {in[0] * in[0] * in[0]};
  }
  Tensors vjp(std::span<const Tensor> saved, std::span<const Tensor> cot) override {
    return {cot[0] * saved[0] * saved[0] * 3.0};
  }
};

// Returns its input and twice it; its derivative is wrong on purpose where `short_list` is set.
class Pair final : public CustomFunction {
 public:
  explicit Pair(bool short_list = false) : short_list_(short_list) {}
  std::string_view name() const override { return "pair"; }
  Tensors forward(std::span<const Tensor> in) override { return {in[0], in[0] * 2.0}; }
  Tensors vjp(std::span<const Tensor>, std::span<const Tensor> cot) override {
    if (short_list_) return {};
    EXPECT_EQ(cot.size(), 2u);
    Tensor g;
    if (cot[0].defined()) g = cot[0];
    if (cot[1].defined()) g = g.defined() ? g + cot[1] * 2.0 : cot[1] * 2.0;
    return {g};
  }

 private:
  bool short_list_;
};

TEST(Autograd, CustomFunctions) {
  Tensor x = leaf({2});
  Tensor y = apply_function(make_ref<Cube>(), List{x})[0];
  Tensor g = grad(List{sum(y)}, List{x}, {}, {.create_graph = true})[0];
  EXPECT_DOUBLE_EQ(number(g), 12);
  EXPECT_DOUBLE_EQ(number(grad(List{sum(g)}, List{x})[0]), 12) << "differentiated again";
  EXPECT_DOUBLE_EQ(number(apply_function(make_ref<Cube>(), {x})[0]), number(y));
  Tensors pair = apply_function(make_ref<Pair>(), List{x});
  backward(sum(pair[0] * 1.0));
  backward(sum(apply_function(make_ref<Pair>(), List{x})[1]));
  EXPECT_DOUBLE_EQ(number(x.grad()), 3);
  Tensors wrong = apply_function(make_ref<Pair>(true), List{x});
  EXPECT_TRUE(mentions(message([&] { backward(sum(wrong[0])); }),
                       "pair: vjp returned 0 gradients for 1 inputs"));
  EXPECT_FALSE(apply_function(make_ref<Cube>(), List{x.detach()})[0].requires_grad());
  Tensor z = sum(apply_function(make_ref<Cube>(), List{x})[0]);
  backward(z);
  EXPECT_TRUE(mentions(message([&] { backward(z); }), "retain_graph"));
}

TEST(Autograd, DeepGraphsAreWalkedAndFreedWithoutRecursion) {
  constexpr int kDepth = 100'000;
  Tensor x = leaf({1});
  {
    Tensor y = x;
    for (int i = 0; i < kDepth; ++i) y = y + 1.0;
    EXPECT_TRUE(y.requires_grad());
  }  // freed unused
  Tensor y = x;
  for (int i = 0; i < kDepth; ++i) y = y * 1.0;
  backward(sum(y));
  EXPECT_DOUBLE_EQ(number(x.grad()), 1);
  // Each node the producer of both operands: exponentially many paths, linearly many nodes.
  Tensor z = x;
  for (int i = 0; i < 64; ++i) z = (z + z) * 0.5;
  backward(sum(z));
  EXPECT_DOUBLE_EQ(number(x.grad()), 2);
}

TEST(Autograd, ScalarsAndTheirGradients) {
  Tensor s = leaf({3});
  Tensor zero_d = reshape(s, {});
  backward(zero_d * zero_d);
  EXPECT_DOUBLE_EQ(number(s.grad()), 6);
  s.set_grad({});
  EXPECT_FALSE(s.grad().defined());
}

}  // namespace
}  // namespace tessera
