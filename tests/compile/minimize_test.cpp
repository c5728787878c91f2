// Runners with a known fault: the graph shrinks to the nodes that show it.
#include "compile/debug/minimize.h"

#include "compile/run/executor.h"
#include "tests/compile/passes/fuzz.h"
#include "tests/compile/passes/graphs.h"
#include "tests/compile/training.h"
#include "tests/support/temp_folder.h"

namespace tessera::compiler {
namespace {

using test::graph_of;

Tensors run_executor(const Graph& g, std::span<const Tensor> in) { return Executor(g).run(in); }

// A runner that runs `other` instead of `op`.
Runner mistaking(std::string_view op, PrimRef other) {
  return [op, other](const Graph& g, std::span<const Tensor> in) {
    Graph wrong = g;
    for (Node& n : wrong.nodes)
      if (n.prim->name() == op) n.prim = other;
    return interpret(wrong, in);
  };
}

PrimRef exp_primitive() {
  return graph_of({ones({2})}, [] { return Tensors{exp(ones({2}))}; }).nodes.back().prim;
}

TEST(Minimize, ATrainingStepShrinksToTheOpAtFault) {
  test::Training training(0.1);
  auto [ids, targets] = test::batch(0);
  Trace trace({.inputs = {ids, targets}});
  Graph graph = trace.finish(training.step(ids, targets));
  Tensor inputs[] = {ids, targets};
  Tensor weight = training.model->parameters()[0].detach().clone();
  Reproducer r = minimize(graph, inputs, mistaking("gelu", exp_primitive()));
  ASSERT_EQ(r.graph.nodes.size(), 1u) << to_string(r);
  EXPECT_EQ(r.graph.nodes[0].prim->name(), "gelu");
  EXPECT_EQ(r.failure, "output 0 differs");
  expect_contains(to_string(r), "= gelu(%0) : f32[3, 8, 64]");
  test::expect_same_bits(training.model->parameters()[0].detach(), weight, "a parameter");
}

TEST(Minimize, WhatThrowsIsAFaultToo) {
  Tensor x = ones({4});
  Graph graph = graph_of({x}, [&] { return Tensors{sum(exp(x) * 2.0)}; });
  Reproducer r = minimize(graph, {&x, 1}, [](const Graph& g, std::span<const Tensor> in) {
    for (const Node& n : g.nodes) TESSERA_CHECK(n.prim->name() != "mul", "no product today");
    return interpret(g, in);
  });
  EXPECT_EQ(r.graph.nodes.size(), 1u) << to_string(r);
  EXPECT_EQ(r.failure, "throws: no product today");
  expect_contains(to_string(r), "%1 = 2");
}

// Two nodes that are wrong only together.
TEST(Minimize, KeepsWhatBelongsTogether) {
  Tensor x = ones({4}), state = zeros({4});
  Graph graph = graph_of({x}, [&] {
    Tensor y = tanh(x) + 1.0;
    add_(state, y);
    return Tensors{exp(gelu(state * 3.0)), sum(y)};
  });
  auto run = [](const Graph& g, std::span<const Tensor> in) {
    Tensors out = interpret(g, in);
    int found = 0;
    for (const Node& n : g.nodes) found += n.prim->name() == "tanh" || n.prim->name() == "gelu";
    if (found == 2) out.pop_back();
    return out;
  };
  Reproducer r = minimize(graph, {&x, 1}, run);
  EXPECT_EQ(r.graph.nodes.size(), 2u) << to_string(r);
}

TEST(Minimize, RefusesWhatDoesNotFail) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    test::RandomStep step(seed);
    Graph graph = graph_of(step.inputs, [&] { return step.run(); });
    expect_contains(error_of([&] { minimize(graph, step.inputs, run_executor); }),
                    "the runner gives the bits of the interpreter");
  }
}

// Every candidate is a graph that verifies: a fault in any op is found in random steps.
TEST(Minimize, RandomSteps) {
  int found = 0;
  for (uint64_t seed = 0; seed < 60; ++seed) {
    test::RandomStep step(seed);
    Graph graph = graph_of(step.inputs, [&] { return step.run(); });
    if (test::count(graph, "tanh") == 0) continue;
    try {
      Reproducer r = minimize(graph, step.inputs, mistaking("tanh", exp_primitive()));
      EXPECT_EQ(r.graph.nodes.size(), 1u) << "seed " << seed << "\n" << to_string(r);
      ++found;
    } catch (const UserError&) {  // what tanh gives goes into nothing
    }
  }
  EXPECT_GT(found, 10);
}

}  // namespace
}  // namespace tessera::compiler
