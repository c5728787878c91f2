// How a trace treats storage: views, writes, detached handles, constants, implicit inputs; the
// modules that nodes belong to; how graphs print.
#include "compile/record/trace.h"

#include <gtest/gtest.h>

#include "compile/ir/interpreter.h"
#include "compile/ir/verify.h"
#include "core/autograd/recompute.h"
#include "core/autograd/transforms.h"
#include "core/dispatch/context.h"
#include "core/nn/nn.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/update.h"
#include "core/optim/optim.h"
#include "tests/compile/bits.h"

namespace tessera::compiler {
namespace {

using test::expect_same_bits;

Tensor values(std::initializer_list<float> v, const Shape& s) { return from_values<float>(v, s); }
int count(const Graph& g, std::string_view op) {
  int n = 0;
  for (const Node& node : g.nodes) n += node.prim->name() == op;
  return n;
}

TEST(Trace, PrintsGraphs) {
  Tensor x = values({1, 2, 3, 4}, {2, 2}), w = values({1, 0, 0, 1}, {2, 2});
  Tensor total = zeros({2});
  Trace trace({.inputs = {x}, .names = {{"w", w}, {"total", total}}});
  Tensor y;
  {
    nn::Scope scope("block");
    y = gelu(transpose(x, 0, 1) * w) * 0.5;
  }
  add_(total, sum(y, {0}));
  Graph g = trace.finish({y, total});
  EXPECT_EQ(
      to_string(g),
      "input %0 : f32[2, 2]\n"
      "implicit %2 : f32[2, 2]  # w\n"
      "implicit %8 : f32[2]  # total\n"
      "%1 = permute(%0; order=[1, 0]) : f32[2, 2] strides [1, 2]  # block forward\n"
      "%3 = mul(%1, %2) : f32[2, 2] strides [1, 2]  # block forward\n"
      "%4 = gelu(%3) : f32[2, 2] strides [1, 2]  # block forward\n"
      "%5 = full(shape=[], value=0.5, dtype=\"f32\", device=\"cpu\") : f32[]  # block forward\n"
      "%6 = mul(%4, %5) : f32[2, 2] strides [1, 2]  # block forward\n"
      "%7 = sum(%6; mask=1, keepdim=0) : f32[2]  # forward\n"
      "%9 = add(%8, %7) into %8 : f32[2]  # forward\n"
      "return %6, %9\n");
}

TEST(Trace, OneMemoryIsOneValue) {
  Tensor x = values({1, 2, 3, 4}, {2, 2});
  Trace trace({.inputs = {x}});
  Tensor y = x.detach() + x;
  Tensor v = transpose(x, 0, 1), w = transpose(v, 0, 1);  // w has x's layout again
  Tensor z = w * y;
  Graph g = trace.finish({z});
  EXPECT_TRUE(g.implicit.empty());
  for (const Node& n : g.nodes)
    if (n.prim->name() == "add" || n.prim->name() == "mul") {
      EXPECT_EQ(n.in[0], 0);
    }
}

TEST(Trace, ViewsAndWritesThroughThem) {
  auto step = [](const Tensor& state, const Tensor& x) {
    Tensor row = select(state, 0, 1);  // a view made before and one made after the write
    Tensor before = row * 2.0;
    add_(row, x);                // writes a part of state
    Tensor both = state * 10.0;  // reads all of it
    add_(state, both);           // writes all
    return before + row;         // reads the part again
  };
  Tensor start = values({1, 2, 3, 4}, {2, 2}), x = values({5, 7}, {2}), x2 = values({-1, 9}, {2});
  Tensor eager = start.clone(), traced = start.clone();
  Tensor first = step(eager, x);
  Trace trace({.inputs = {x}});
  Tensor out = step(traced, x);
  Graph g = trace.finish({out});
  expect_same_bits(out, first, "first");
  expect_same_bits(traced, eager, "state");
  for (const Tensor& in : {x2, x}) {
    Tensor expected = step(eager, in);
    expect_same_bits(interpret(g, {in})[0], expected, "replayed");
    expect_same_bits(traced, eager, "state after replay");
  }
}

TEST(Trace, AViewOfAParameterMadeBeforeTheTrace) {
  Tensor flat = values({1, 2, 3, 4, 5, 6}, {6}), part = reshape(slice(flat, 0, 2, 6), {2, 2});
  auto step = [&] {
    mul_(part, 2);
    add_(flat, flat);
    return part + 1.0;
  };
  Trace trace;
  Tensor out = step();
  Graph g = trace.finish({out});
  EXPECT_EQ(g.implicit.size(), 1u);  // one memory
  EXPECT_GT(count(g, "as_strided"), 0);
  expect_same_bits(out, values({13, 17, 21, 25}, {2, 2}), "traced");
  expect_same_bits(interpret(g, {})[0], values({49, 65, 81, 97}, {2, 2}), "replayed");
  expect_same_bits(flat, values({4, 8, 48, 64, 80, 96}, {6}), "memory");
}

TEST(Trace, RecordedValuesAreNotTakenOver) {
  Tensor x = values({1, 2}, {2});
  Trace trace({.inputs = {x}});
  // Each temporary is uniquely owned by the program, and eager would work in place.
  Tensor y = exp(neg(x * 2.0) + 1.0);
  Graph g = trace.finish({y});
  for (const Node& n : g.nodes)
    for (ValueId id : n.out) EXPECT_EQ(g[id].buffer, id) << to_string(g, n);
  expect_same_bits(interpret(g, {x})[0], y, "replayed");
}

TEST(Trace, MemoryNobodyCanReadIsForgotten) {
  Tensor x = zeros({1 << 16});
  Trace trace({.inputs = {x}});
  Tensor y = x;
  reset_peak_cpu_memory();
  for (int i = 0; i < 2000; ++i) y = y + 1.0;
  EXPECT_LT(cpu_memory_stats().peak_bytes, 400 * x.nbytes());
  Graph g = trace.finish({y});
  expect_same_bits(interpret(g, {x})[0], full({1 << 16}, 2000.0), "replayed");
}

TEST(Trace, NumbersAreConstantsAndStateIsNot) {
  Tensor x = values({1, 2}, {2}), rate = scalar_tensor(0.5, kF32);
  Trace trace({.inputs = {x}});
  Tensor y = x * 3.0 + rate;
  Graph g = trace.finish({y});
  EXPECT_EQ(g.implicit.size(), 1u);
  fill_(rate, 10);
  expect_same_bits(interpret(g, {x})[0], values({13, 16}, {2}), "a new rate");
}

TEST(Trace, RandomKeysMoveOn) {
  Generator a(7), b(7);
  auto draw = [](Generator& g) {
    Scoped<Generator*> use(context().generator, &g);
    return rand({4});
  };
  Trace trace;
  Tensor first = draw(b);
  Graph g = trace.finish({first});
  expect_same_bits(first, draw(a), "first");
  for (int i = 0; i < 3; ++i) expect_same_bits(interpret(g, {})[0], draw(a), "next");
  expect_same_bits(a.state(), b.state(), "state");
}

TEST(Trace, PhasesAndScopes) {
  auto model = nn::sequential(nn::linear(3, 4), nn::gelu(), nn::linear(4, 1));
  auto opt = optim::SGD(model->parameters(), {.lr = 0.1});
  Tensor x = ones({2, 3});
  Trace trace({.inputs = {x}, .names = model->named_parameters()});
  Tensor loss = mean(square((*model)(x)));
  loss.backward();
  opt.step();
  Graph g = trace.finish({loss});
  int contracts[kNumPhases] = {}, last = 0;
  for (const Node& n : g.nodes) {
    EXPECT_GE(int(n.phase), last) << to_string(g, n);
    last = int(n.phase);
    if (n.prim->name() == "contract") {
      ++contracts[int(n.phase)];
      EXPECT_TRUE(g.scopes[size_t(n.scope)] == "0" || g.scopes[size_t(n.scope)] == "2")
          << to_string(g, n);
    }
    if (n.prim->name() == "sgd") {
      EXPECT_EQ(n.phase, Phase::kUpdate);
    }
    if (n.prim->is_view()) {
      EXPECT_EQ(n.role, Role::kView);
    }
  }
  EXPECT_EQ(contracts[int(Phase::kForward)], 2);
  EXPECT_EQ(contracts[int(Phase::kBackward)], 3);  // x needs no gradient
  EXPECT_EQ(context().phase, Phase::kForward);
}

TEST(Trace, SecondDerivatives) {
  auto curvature = [](const Tensor& at) {
    Tensor x = at.detach().requires_grad_();
    Tensor slope = grad({{sum(tanh(x) * x)}}, {{x}}, {}, {.create_graph = true})[0];
    return grad({{sum(square(slope))}}, {{x}})[0];
  };
  Tensor x = values({0.5, -1, 2}, {3}), y = values({1, 0.25, -3}, {3});
  Trace trace({.inputs = {x}});
  Tensor traced = curvature(x);
  Graph g = trace.finish({traced});
  expect_same_bits(traced, curvature(x), "traced");
  expect_same_bits(interpret(g, {y})[0], curvature(y), "replayed");
}

// The ops of a custom function have its scope, in both directions.
TEST(Trace, CustomFunctions) {
  struct Twice final : CustomFunction {
    std::string_view name() const override { return "twice"; }
    Tensors forward(std::span<const Tensor> in) override { return {in[0] * 2.0}; }
    Tensors vjp(std::span<const Tensor>, std::span<const Tensor> cot) override {
      return {cot[0] * 2.0};
    }
  };
  Tensor x = ones({3}).requires_grad_();
  Trace trace({.inputs = {x}});
  Tensor y = exp(x), z;
  {
    nn::Scope scope("custom");
    z = apply_function(make_ref<Twice>(), {{y}})[0];
  }
  sum(z).backward();
  Graph g = trace.finish({x.grad()});
  int found = 0;
  for (const Node& n : g.nodes)
    if (n.prim->name() == "mul" && g.scopes[size_t(n.scope)] == "custom") ++found;
  EXPECT_EQ(found, 2) << to_string(g);
}

TEST(Trace, RunsOnMetaTensors) {
  Tensor x = empty({2, 3}, kF32, kMeta);
  Trace trace({.inputs = {x}});
  Tensor y = sum(exp(x) * 2.0);
  Graph g = trace.finish({y});
  EXPECT_EQ(g[g.outputs[0]].meta.shape, Shape{});
  EXPECT_TRUE(zeros({2}, {.device = kMeta}).device().is_meta());
}

std::string error_of(FunctionRef<void()> f) {
  try {
    f();
  } catch (const UserError& e) {
    return e.what();
  }
  return "no error";
}

TEST(Trace, RefusesWhatIsNoOpInATransformInARecomputationToo) {
  Tensor x = zeros({4}), w = ones({4}).requires_grad_();
  auto f = [&](const Tensor& t) {
    add_hook(w, [](const Tensor& g) { return g; });
    return sum(t * w);
  };
  EXPECT_NE(error_of([&] {
              Trace trace({.inputs = {x}});
              recompute([&](const Tensor& t) { return grad(f)(t); }, x);
            }).find("trace: a hook of a gradient is added or removed while a step is recorded"),
            std::string::npos);
  EXPECT_EQ(context().observer, nullptr);
  EXPECT_FALSE(context().records);
}

TEST(Trace, Refuses) {
  Tensor x = zeros({4}), half = slice(x, 0, 0, 2);
  EXPECT_NE(error_of([&] {
              Trace outer;
              Trace inner;
            }).find("traces do not nest"),
            std::string::npos);
  EXPECT_EQ(context().backend, nullptr);
  EXPECT_NE(error_of([&] {
              Trace trace({.inputs = {half}});
              Tensor y = x + 1.0;
            }).find("pass it as an input of its own"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              Trace trace({.inputs = {x, half}});
              add_(half, ones({2}));
            }).find("clone one of them"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              Trace trace({.inputs = {x}});
              Tensor y = x + 1.0;
              x.storage()->bump_version();
              Tensor z = x + y;
            }).find("was written by something that is not an op"),
            std::string::npos);
  Trace trace({.inputs = {x}});
  Graph g = trace.finish({x + 1.0});
  EXPECT_NE(error_of([&] { interpret(g, {zeros({5})}); }).find("interpret: input 0 is f32[5]"),
            std::string::npos);
  EXPECT_NE(error_of([&] { interpret(g, {}); }).find("0 inputs"), std::string::npos);
}

}  // namespace
}  // namespace tessera::compiler
