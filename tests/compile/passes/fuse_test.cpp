// Which nodes become one kernel, what the kernel computes, and what must stay separate.
#include <gtest/gtest.h>

#include "compile/codegen/fused.h"
#include "core/base/boundary.h"
#include "core/base/function_ref.h"
#include "core/dispatch/context.h"
#include "core/nn/scope.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/scan.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "tests/compile/passes/graphs.h"
#include "tests/support/boundaries.h"

namespace tessera::compiler {
namespace {

Tensor ramp(const Shape& s, double first = -1) {
  return reshape(arange(0, numel(s), 1, {kF64}) * 0.25 + first, s);
}

// The names of ops; for kernels, of the ops they are made of: "add_gelu sum".
std::string kernels(const Graph& g) {
  std::string text;
  for (const Node& n : g.nodes) {
    if (n.role == Role::kView || n.role == Role::kConstant) continue;
    const Fused* fused = as_fused(*n.prim);
    text +=
        (text.empty() ? "" : " ") + (fused ? "[" + fused->name + "]" : std::string(n.prim->name()));
  }
  return text;
}

template <class F>
Graph fused(const std::vector<Tensor>& in, F step) {
  return test::checked(test::graph_of(in, step), in, [](Graph& x) { run_passes(x); });
}

std::string body_of(const Graph& g) {
  for (const Node& n : g.nodes)
    if (const Fused* f = as_fused(*n.prim)) return to_string(f->body);
  return "";
}

// A quantising conversion is one pass over memory, and so is the way back.
TEST(Fuse, ConversionsToStorageFormatsAreEdgesOfKernels) {
  for (DType t : {kF8E4M3, kF8E5M2}) {
    const std::vector<Tensor> in = {cast(ramp({6, 50}), kF32), full({}, 3.0, {kF32})};
    Graph g = fused(in, [&]() -> Tensors { return {clamp(in[0] * in[1], -448.0, 448.0).to(t)}; });
    EXPECT_EQ(kernels(g), "[clamp]");
    EXPECT_NE(body_of(g).find(name_of(t)), std::string::npos) << body_of(g);
    const std::vector<Tensor> stored = {in[0].to(t), in[1]};
    g = fused(stored, [&]() -> Tensors { return {exp(stored[0].to(kF32) * stored[1])}; });
    EXPECT_EQ(kernels(g), "[exp]");
  }
}

TEST(Fuse, KernelsAtTheirLimits) {
  const auto kernels_of = [](const Graph& g) {
    return std::ranges::count_if(g.nodes, [](const Node& n) { return n.role == Role::kCompute; });
  };
  CountBoundaries counting;
  const std::vector<Tensor> in = {ramp({2, 3}), ramp({3})};
  for (int steps : {253, 254, 255}) {  // and two operands
    Graph g = fused(in, [&]() -> Tensors {
      Tensor x = in[0];
      for (int i = 0; i < steps; ++i) x = i % 2 ? x * in[1] : maximum(x, in[1]);
      return {x};
    });
    EXPECT_EQ(kernels_of(g), steps <= 254 ? 1 : 2) << steps << " steps";
  }
  for (size_t operands : {46, 47, 48}) {  // and a result
    std::vector<Tensor> many;
    for (size_t i = 0; i < operands; ++i) many.push_back(ramp({5}, double(i)));
    Graph g = fused(many, [&]() -> Tensors {
      Tensor x = many[0];
      for (size_t i = 1; i < operands; ++i) x = x + many[i];
      return {x};
    });
    EXPECT_EQ(kernels_of(g), operands <= 47 ? 1 : 2) << operands << " operands";
  }
  EXPECT_EQ(test::not_met({"fuse"}), "");
}

TEST(Fuse, ChainsOfPointwiseOps) {
  std::vector<Tensor> in = {ramp({2, 3}), ramp({3})};
  Graph g = fused(in, [&]() -> Tensors {
    nn::Scope scope("h.0.mlp");
    return {gelu(in[0] + in[1]) * 2.0};
  });
  EXPECT_EQ(kernels(g), "[h_0_mlp_gelu]");
  EXPECT_EQ(body_of(g),
            "loops[2, 3]\noperand 0: f64[3, 1]\noperand 1: f64[0, 1]\nv0 = load 0 : f64 loops 11\n"
            "v1 = load 1 : f64 loops 10\nv2 = add(v0, v1) : f64 loops 11\n"
            "v3 = gelu(v2) : f64 loops 11\nv4 = 0x1p+1 : f64 loops 0\n"
            "v5 = mul(v3, v4) : f64 loops 11\nstore v5 to f64[3, 1]\n");
}

TEST(Fuse, ReshapesSplitLoops) {
  std::vector<Tensor> in = {ramp({2, 3, 4}), ramp({6, 4}), ramp({3, 4})};
  Graph g = fused(in, [&]() -> Tensors {
    Tensor flat = exp(reshape(in[0], {6, 4})) * in[1];
    return {reshape(flat, {2, 3, 4}) + in[2]};
  });
  EXPECT_EQ(kernels(g), "[exp]");
  EXPECT_EQ(body_of(g).substr(0, 12), "loops[2, 12]");  // [3, 4] is one loop again
}

TEST(Fuse, HeadsAndPermutes) {
  std::vector<Tensor> in = {ramp({2, 3, 8}), ramp({2, 2, 3, 4})};
  Graph g = fused(in, [&]() -> Tensors {
    Tensor heads = permute(reshape(neg(in[0]), {2, 3, 2, 4}), {0, 2, 1, 3});
    return {heads * in[1]};
  });
  EXPECT_EQ(kernels(g), "[neg_mul]");
}

TEST(Fuse, SoftmaxIsOneSweep) {
  std::vector<Tensor> in = {ramp({4, 5})};
  Graph g = fused(in, [&]() -> Tensors {
    Tensor e = exp(in[0] - amax(in[0], {1}, true));
    return {e / sum(e, {1}, true)};
  });
  EXPECT_EQ(kernels(g), "[amax_exp_sum]");
}

TEST(Fuse, RowsAndColumnsOfOneSweep) {
  std::vector<Tensor> in = {ramp({4, 5}), ramp({4, 5}, 2)};
  Graph g = fused(in, [&]() -> Tensors {
    Tensor y = in[0] * in[1];
    return {y - sum(y, {1}, true), sum(y, {0}), sum(in[0], {0})};
  });
  EXPECT_EQ(kernels(g), "[sum]");
}

// Values that follow from a sum over everything may be computed at the end, but not in a second
// sweep.
TEST(Fuse, ASumOverRowsEndsTheSweep) {
  std::vector<Tensor> in = {ramp({4, 5})};
  Graph g = fused(in, [&]() -> Tensors { return {sqrt(sum(square(in[0]))) * 3.0}; });
  EXPECT_EQ(kernels(g), "[sum_sqrt]");
  in = {ramp({300, 300})};  // more than a row may have
  g = fused(
      in, [&]() -> Tensors { return {(in[0] - mean(in[0], {0}, true)) / sum(in[0], {1}, true)}; });
  EXPECT_EQ(std::ranges::count(kernels(g), ' '), 1) << to_string(g);
}

TEST(Fuse, ATransposedReadIsAnotherSweep) {
  std::vector<Tensor> in = {ramp({3, 3})};
  Graph g = fused(in, [&]() -> Tensors {
    Tensor e = exp(in[0]);
    return {e + transpose(e, 0, 1)};
  });
  EXPECT_EQ(kernels(g), "exp add");
  in = {ramp({300, 300})};
  g = fused(in, [&]() -> Tensors { return {exp(in[0]) + transpose(in[0], 0, 1)}; });
  EXPECT_EQ(kernels(g), "[exp_add]");  // memory may be read both ways
}

TEST(Fuse, NoWayOutAndBack) {
  std::vector<Tensor> in = {ramp({3, 4})};
  Graph g = fused(in, [&]() -> Tensors {
    Tensor a = exp(in[0]), b = cumsum(a, 1);
    return {a * b + 1.0};
  });
  EXPECT_EQ(kernels(g), "exp cumsum [mul_add]");
  g = fused(in, [&]() -> Tensors {
    Tensor a = exp(in[0]);
    return {a * narrow(a, 1, 0, 1)};  // a part of what the sweep makes
  });
  EXPECT_EQ(kernels(g), "exp mul");
}

TEST(Fuse, NumbersAreComputedWhereTheyAreRead) {
  std::vector<Tensor> in = {ramp({4, 4})};
  Graph g = fused(in, [&]() -> Tensors {
    Tensor half = full({}, 0.5, {kF64});
    Tensor a = tril(in[0] * half);
    return {a, cumsum(a, 0) * half - 1.0};
  });
  EXPECT_EQ(kernels(g), "[mul_where] cumsum [mul_sub]") << to_string(g);
  EXPECT_EQ(test::count(g, "full") + test::count(g, "arange"), 0) << to_string(g);
}

TEST(Fuse, MasksAreComputedByEveryKernelThatReadsThem) {
  std::vector<Tensor> in = {ramp({4, 4})};
  Graph g = fused(in, [&]() -> Tensors {
    Tensor mask = le(arange(0, 4), unsqueeze(arange(0, 4), 1)), zero = full({}, 0.0, {kF64});
    Tensor a = where(mask, in[0], zero);
    return {where(mask, cumsum(a, 0), zero)};
  });
  EXPECT_EQ(kernels(g), "[where] cumsum [where]") << to_string(g);
  g = fused(in, [&]() -> Tensors {
    Tensor mask = le(arange(0, 4), unsqueeze(arange(0, 4), 1));
    return {where(mask, in[0], exp(in[0])), mask};  // is asked for
  });
  EXPECT_EQ(kernels(g), "[le_exp]") << to_string(g);
}

// x, a product, and the bias are kept anyway, so their sum is not kept for backward.
Tensors bias_step(const std::vector<Tensor>& in, FunctionRef<void()> between) {
  Tensor x = cumsum(in[0], 1), sum_ = x + in[1], y = exp(sum_);
  Tensor z = cumsum(y, 1);
  between();
  Scoped<Phase> backward(context().phase, Phase::kBackward);
  Tensor back = z * tanh(sum_);
  return {back, sum(back, {0})};
}

TEST(Fuse, BackwardAddsABiasAgain) {
  std::vector<Tensor> in = {ramp({9, 5}), ramp({5})};
  Graph g = fused(in, [&]() -> Tensors { return bias_step(in, [] {}); });
  EXPECT_EQ(kernels(g), "cumsum [add_exp] cumsum [tanh_sum]") << to_string(g);
  EXPECT_EQ(g.nodes[1].out.size(), 1u) << to_string(g);
  EXPECT_EQ(g.nodes[3].in.size(), 3u) << to_string(g);
}

TEST(Fuse, WhatChangesIsKept) {
  std::vector<Tensor> in = {ramp({9, 5}), ramp({5})};
  Graph g = fused(in, [&]() -> Tensors { return bias_step(in, [&] { mul_(in[1], 2.0); }); });
  for (const Node& n : g.nodes)
    if (n.prim->name() == "fused" && n.phase == Phase::kForward && n.into.empty()) {
      EXPECT_EQ(n.out.size(), 2u) << to_string(g);
    }
  g = fused(in, [&]() -> Tensors {
    Tensor x = cumsum(in[0], 1), y = x + in[1], kept = cumsum(y, 0);  // y is in memory
    Scoped<Phase> backward(context().phase, Phase::kBackward);
    return {exp(y) * kept};
  });
  EXPECT_EQ(kernels(g), "cumsum add cumsum [exp_mul]") << to_string(g);
}

TEST(Fuse, EffectsAreResults) {
  std::vector<Tensor> in = {ramp({2, 3})};
  Tensor state = ramp({2, 3}, 5), wide = ramp({2, 6});
  Graph g = fused(in, [&]() -> Tensors {
    Tensor y = exp(in[0]);
    add_(state, y * 0.1);
    assign_(narrow(wide, 1, 2, 3), y);
    return {neg(y), state * 2.0};
  });
  EXPECT_EQ(kernels(g), "[exp]") << to_string(g);
  const Node& n = g.nodes.back();
  EXPECT_EQ(std::ranges::count(n.into, kNoValue), 2) << to_string(g, n);
  EXPECT_EQ(n.into.size(), 4u);
}

TEST(Fuse, OneWriteOfAMemory) {
  std::vector<Tensor> in = {ramp({2, 2})};
  Tensor state = ramp({2, 2}, 5);
  Graph g = fused(in, [&]() -> Tensors {
    add_(state, exp(in[0]));
    add_(state, tanh(in[0]));
    return {};
  });
  EXPECT_EQ(std::ranges::count(kernels(g), ' '), 1) << to_string(g);
  g = fused(in, [&]() -> Tensors {
    Tensor crossed = exp(transpose(state, 0, 1));
    assign_(state, crossed * in[0]);  // writes what others of its elements still read
    return {};
  });
  EXPECT_EQ(kernels(g), "[exp_mul] copy") << to_string(g);
}

TEST(Fuse, WhatIsReadBeforeAWriteIsReadBefore) {
  std::vector<Tensor> in = {ramp({2, 3})};
  Tensor state = ramp({2, 3}, 5);
  Graph g = fused(in, [&]() -> Tensors {
    Tensor old = cumsum(state, 1), y = neg(state);
    add_(state, in[0]);
    return {y * exp(state), old};
  });
  EXPECT_EQ(kernels(g), "cumsum [exp]") << to_string(g);
}

TEST(Fuse, IntegerDivisionStaysWithItsKernel) {
  std::vector<Tensor> in = {from_values<int64_t>({7, 8, 9}, {3})};
  Graph g = fused(in, [&]() -> Tensors { return {neg(floor_divide(in[0] + 1, full({}, 2))) * 3}; });
  EXPECT_EQ(kernels(g), "add floor_divide [neg_mul]");
}

TEST(Fuse, NarrowTypesRoundWhereTheyDid) {
  std::vector<Tensor> in = {cast(ramp({5, 7}), kBF16), cast(ramp({7}), kBF16)};
  Graph g = fused(in, [&]() -> Tensors {
    Tensor y = (in[0] + in[1]) * in[0];
    return {y, gelu(cast(y, kF32)), sum(cast(gt(y, 0), kI32), {1})};
  });
  EXPECT_EQ(kernels(g), "[gelu_gt_sum]");
}

}  // namespace
}  // namespace tessera::compiler
