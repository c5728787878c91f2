// What backward computes again: the cheapest first, nothing that must not run twice, and with equal
// bits.
#include "compile/passes/recompute.h"

#include <gtest/gtest.h>

#include "compile/build.h"
#include "compile/run/program.h"
#include "core/dispatch/context.h"
#include "core/ops/contract.h"
#include "core/ops/random.h"
#include "tests/compile/passes/close.h"
#include "tests/compile/passes/fuzz.h"
#include "tests/compile/passes/graphs.h"
#include "tests/compile/training.h"

namespace tessera::compiler {
namespace {

using test::checked, test::graph_of, test::nodes_of;

// Ops of a backward pass that is written down by hand.
struct InBackward {
  Scoped<Phase> phase{context().phase, Phase::kBackward};
};

std::vector<int32_t> all_of(const std::vector<std::vector<int32_t>>& groups) {
  std::vector<int32_t> nodes;
  for (auto& g : groups) nodes.insert(nodes.end(), g.begin(), g.end());
  return nodes;
}
Graph everything(const Graph& g) { return recomputed(g, all_of(recomputable(g))); }
size_t arena_of(const Graph& g) { return make_program(g).arena_bytes(); }

TEST(Recompute, TheCheapestForItsMemoryFirst) {
  Tensor x = rand({64, 64}), w = rand({64, 512});
  Graph graph = graph_of({x, w}, [&] {
    Tensor a = matmul(x, w), b = exp(a);
    Tensor total = sum(b);
    InBackward here;
    return Tensors{total, sum(b * 2.0), sum(a)};
  });
  EXPECT_EQ(recomputable(graph), (std::vector<std::vector<int32_t>>{{1}, {0}})) << nodes_of(graph);
  std::vector<Tensor> in{x, w};
  Graph after = checked(graph, in, [](Graph& g) { g = recomputed(g, {1}); });
  std::string ops;
  for (const Node& n : after.nodes)
    ops += std::string(n.prim->name()) + (n.phase == Phase::kBackward ? "' " : " ");
  EXPECT_EQ(ops, "contract exp sum full' exp' mul' sum' sum' ");
  EXPECT_EQ(test::count(checked(graph, in, [](Graph& g) { g = everything(g); }), "contract"), 2);
}

// a is not kept for backward, but b cannot be computed again without it.
TEST(Recompute, WhatIsNotKeptRunsAgainToo) {
  Tensor x = rand({32, 32});
  Graph graph = graph_of({x}, [&] {
    Tensor b = sin(exp(x)), total = sum(b);
    InBackward here;
    return Tensors{total, sum(transpose(b, 0, 1) * 2.0)};
  });
  EXPECT_EQ(recomputable(graph), (std::vector<std::vector<int32_t>>{{1, 0}}));
  Graph after = checked(graph, std::vector<Tensor>{x}, [](Graph& g) { g = everything(g); });
  EXPECT_EQ(test::count(after, "exp"), 2);
  EXPECT_LT(arena_of(after), 2 * arena_of(graph));
}

TEST(Recompute, WhatMayNotRunTwiceStays) {
  Tensor x = rand({32, 32}), state = rand({32, 32}), key = from_values<int64_t>({7, 3}, {2});
  auto groups = [&](auto value) {
    Graph graph = graph_of({x}, [&] {
      Tensor v = value(), total = sum(v);
      if (v.numel() > 1) assign_(state, x);
      InBackward here;
      return Tensors{total, sum(v * 3.0), v};
    });
    graph.outputs.pop_back();
    return recomputable(graph).size();
  };
  EXPECT_EQ(groups([&] { return exp(x); }), 1u);
  EXPECT_EQ(groups([&] { return exp(state); }), 0u);      // written since
  EXPECT_EQ(groups([&] { return rand({32, 32}); }), 0u);  // the generator has gone on since
  EXPECT_EQ(groups([&] { return rand({32, 32}, {}, key); }), 1u) << "the same draw again";
  Graph output = graph_of({x}, [&] {
    Tensor v = exp(x);
    InBackward here;
    return Tensors{v, sum(v)};
  });
  EXPECT_TRUE(recomputable(output).empty());
}

TEST(Recompute, StepOfAGptWithMoreAndMore) {
  test::Training t(0.1);
  auto [ids, targets] = test::batch(0);
  std::vector<Tensor> in = {ids, targets};
  Trace trace({.inputs = in, .names = t.state()});
  Tensors out = t.step(ids, targets);
  Graph graph = trace.finish(out);
  std::vector<std::vector<int32_t>> groups = recomputable(graph);
  ASSERT_GT(groups.size(), 10u);
  std::vector<int32_t> nodes;
  for (size_t i = 0; i < groups.size(); ++i) {
    nodes.insert(nodes.end(), groups[i].begin(), groups[i].end());
    if (i % 8 && i + 1 < groups.size()) continue;
    checked(graph, in, [&](Graph& g) { g = recomputed(g, nodes); });
    if (HasFailure()) return;
  }
}

TEST(Recompute, RandomSteps) {
  int changed = 0;
  for (uint64_t seed = 0; seed < 600; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    test::RandomStep step(seed);
    Graph graph = graph_of(step.inputs, [&] { return step.run(); });
    Graph after = checked(graph, step.inputs, [](Graph& g) { g = everything(g); });
    changed += after.nodes.size() > graph.nodes.size();
    if (HasFailure()) return;
  }
  EXPECT_GT(changed, 50);
}

TEST(Recompute, AStepKeepsToItsLimit) {
  test::Training t({.vocab = 11, .context = 64, .layers = 4, .heads = 2, .dim = 16, .dropout = 0});
  Tensor ids = randint(0, 11, {4, 64}), targets = randint(0, 11, {4, 64});
  std::vector<Tensor> in = {ids, targets};
  Trace trace({.inputs = in, .names = t.state()});
  Tensors out = t.step(ids, targets);
  Graph graph = trace.finish(out);
  auto peak = [](const Executor& e) { return e.memory().arena_bytes + e.memory().output_bytes; };
  size_t whole = peak(build(graph, {}));
  size_t last = whole;
  for (double share : {0.8, 0.5}) {
    auto limit = size_t(double(whole) * share);
    Executor limited = build(graph, {.memory_limit = limit});
    EXPECT_LE(peak(limited), limit);
    EXPECT_LT(peak(limited), last);
    last = peak(limited);
    test::expect_close(test::results(limited.graph(), in), test::results(graph, in),
                       {1e-6, 1e-4, 0, 0}, to_string(limited.graph()));
  }
  testing::internal::CaptureStderr();
  build(graph, {.memory_limit = 100});
  EXPECT_NE(testing::internal::GetCapturedStderr().find("more than the limit of 0.0 MB"),
            std::string::npos);
}

}  // namespace
}  // namespace tessera::compiler
