// Where collectives are placed: beside computation that they do not need, and in their order. Nodes
// can run in the new order: random steps compute the same bits.
#include <gtest/gtest.h>

#include "collectives/loopback/run_ranks.h"
#include "collectives/ops.h"
#include "core/ops/contract.h"
#include "core/ops/random.h"
#include "tests/compile/passes/fuzz.h"
#include "tests/compile/passes/graphs.h"

namespace tessera::compiler {
namespace {

using test::checked, test::graph_of;

std::string ops(const Graph& graph) {
  std::string names;
  for (const Node& n : graph.nodes)
    if (n.role != Role::kView) names += std::string(n.prim->name()) + " ";
  return names;
}

// Makes a group of one rank, so that `step` may communicate; returns the names of ops before and
// after the pass.
template <class F>
std::pair<std::string, std::string> placed(std::vector<Tensor> in, F step) {
  std::pair<std::string, std::string> names;
  run_ranks(1, [&](ProcessGroup& g) {
    Graph graph = graph_of(in, [&] { return step(Ref<ProcessGroup>(&g)); });
    names = {ops(graph), ops(checked(graph, in, overlap_collectives))};
  });
  return names;
}

TEST(Overlap, TheGradientOfTheWeightIsComputedBesideTheReduction) {
  Tensor dy = rand({64, 32}), x = rand({64, 32}), w = rand({32, 32});
  auto [before, after] = placed({dy, x, w}, [&](const Ref<ProcessGroup>& group) {
    Tensor dx = matmul(dy, w), dw = matmul(transpose(dy, 0, 1), x);
    return Tensors{exp(all_reduce(sin(dx), group)), cos(dw)};
  });
  EXPECT_EQ(before, "contract contract sin all_reduce exp cos ");
  EXPECT_EQ(after, "contract sin all_reduce contract exp cos ");
}

// Where computation already takes long enough, nothing moves further than it has to.
TEST(Overlap, NoMoreThanNeeded) {
  Tensor x = rand({1024, 1024}), y = rand({16});  // 8 MB in and out: 400 us by the estimate
  auto step = [&](const Ref<ProcessGroup>& group) {
    Tensor a = sin(x), b = cos(x), c = all_reduce(y * 2.0, group);
    return Tensors{exp(c), a, b};
  };
  EXPECT_EQ(placed({x, y}, step).second, "sin full mul all_reduce cos exp ");
  auto covered = [&](const Ref<ProcessGroup>& group) {
    Tensor a = sin(x), c = all_reduce(y * 2.0, group), b = cos(x);
    return Tensors{exp(c), a, b};
  };
  auto [before, after] = placed({x, y}, covered);
  EXPECT_EQ(before, after);
}

TEST(Overlap, CollectivesKeepTheirOrder) {
  Tensor x = rand({256, 256}), y = rand({16});
  auto [before, after] = placed({x, y}, [&](const Ref<ProcessGroup>& group) {
    Tensor first = all_gather(sin(x), group), other = exp(x), second = all_reduce(y, group);
    return Tensors{first, second + 1.0, other};
  });
  EXPECT_EQ(before, "sin all_gather exp all_reduce full add ");
  EXPECT_EQ(after, "sin all_gather all_reduce exp full add ");
}

// `sqrt` hides the first reduction, whose reader ends the search.
TEST(Overlap, WhatHidesAnotherCollectiveStays) {
  Tensor x = rand({64, 64});
  auto [before, after] = placed({x}, [&](const Ref<ProcessGroup>& group) {
    Tensor first = all_reduce(x, group), beside = sqrt(x);
    Tensor second = all_reduce(exp(first), group);
    return Tensors{cos(second), beside};
  });
  EXPECT_EQ(before, "all_reduce sqrt exp all_reduce cos ");
  EXPECT_EQ(after, before);
}

TEST(Overlap, MemoryThatIsWrittenKeepsItsOrder) {
  Tensor x = rand({32, 32}), state = rand({32, 32});
  auto [before, after] = placed({x}, [&](const Ref<ProcessGroup>& group) {
    Tensor old = state * 2.0;  // before the reduction writes it
    all_reduce_(state, group);
    return Tensors{exp(state), old};
  });
  EXPECT_EQ(after, before);
}

// Every third op counts as a collective.
TEST(Overlap, RandomSteps) {
  int moved = 0;
  for (uint64_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    test::RandomStep step(seed);
    Graph graph = graph_of(step.inputs, [&] { return step.run(); });
    for (size_t k = seed % 3; k < graph.nodes.size(); k += 3)
      if (Node& n = graph.nodes[k]; n.role == Role::kCompute) n.role = Role::kCollective;
    auto collectives = [](const Graph& g) {
      std::string names;
      for (const Node& n : g.nodes)
        if (n.role == Role::kCollective) names += std::string(n.prim->name()) + " ";
      return names;
    };
    Graph after = checked(graph, step.inputs, overlap_collectives);
    EXPECT_EQ(collectives(after), collectives(graph));
    moved += ops(after) != ops(graph);
    if (HasFailure()) return;
  }
  EXPECT_GT(moved, 100);
}

}  // namespace
}  // namespace tessera::compiler
