// A whole training step as one graph: forward, backward, clipping, AdamW, dropout and its
// generator. Replayed for five steps, it equals five eager steps bit for bit.
#include <gtest/gtest.h>

#include "compile/ir/interpreter.h"
#include "compile/ir/verify.h"
#include "compile/record/trace.h"
#include "tests/compile/training.h"

namespace tessera::compiler {
namespace {

using test::expect_same_bits;

using test::batch;
using test::Training;

void compare(double dropout) {
  Training eager(dropout), traced(dropout);
  auto [ids, targets] = batch(0);
  Tensors expected = eager.step(ids, targets);
  Trace trace({.inputs = {ids, targets}, .names = traced.state()});
  Tensors first = traced.step(ids, targets);
  Graph graph = trace.finish(first);
  expect_same_bits(first, expected, "traced step");
  for (int n = 1; n <= 5; ++n) {
    auto [i, t] = batch(n);
    for (Training* run : {&eager, &traced}) run->opt->set_lr(1e-2 / (n + 1));  // nothing is frozen
    expected = eager.step(i, t);
    expect_same_bits(interpret(graph, {i, t}), expected, "step " + std::to_string(n));
    auto a = traced.state(), b = eager.state();
    for (size_t k = 0; k < a.size(); ++k)
      expect_same_bits(a[k].tensor, b[k].tensor, a[k].name + " after step " + std::to_string(n));
  }
}

TEST(Step, ReplayedEqualsEager) { compare(0); }
TEST(Step, ReplayedEqualsEagerWithDropout) { compare(0.2); }

TEST(Step, TheGraphSaysWhereItsNodesComeFrom) {
  Training t(0.1);
  auto [ids, targets] = batch(0);
  Trace trace({.inputs = {ids, targets}, .names = t.state()});
  Graph g = trace.finish(t.step(ids, targets));
  for (const ImplicitInput& i : g.implicit)
    EXPECT_TRUE(!i.name.empty() || i.tensor.numel() <= 2) << "%" << i.id;  // constants of the core
  for (const Node& n : g.nodes) {
    if (n.phase == Phase::kUpdate) continue;
    if (n.prim->name() != "gelu" && n.prim->name() != "contract" && n.prim->name() != "dropout" &&
        n.prim->name() != "layer_norm")
      continue;
    EXPECT_FALSE(g.scopes[size_t(n.scope)].empty()) << to_string(g, n);
  }
  EXPECT_NE(to_string(g).find("# h.1.mlp.c_fc backward"), std::string::npos) << to_string(g);
}

}  // namespace
}  // namespace tessera::compiler
