// A whole training step through the passes.
#include <gtest/gtest.h>

#include "tests/compile/passes/close.h"
#include "tests/compile/passes/graphs.h"
#include "tests/compile/training.h"

namespace tessera::compiler {
namespace {

Graph traced(test::Training& t, std::vector<Tensor>& in) {
  auto [ids, targets] = test::batch(0);
  in = {ids, targets};
  Trace trace({.inputs = in, .names = t.state()});
  Tensors out = t.step(ids, targets);
  return trace.finish(out);
}

TEST(StepPasses, CleaningUpChangesNoBit) {
  test::Training t(0.1);
  std::vector<Tensor> in;
  Graph g = traced(t, in);
  Graph after = test::checked(g, in, [](Graph& x) { run_passes(x, "decompose,accumulate,fuse"); });
  for (const Node& n : after.nodes)  // gradients are read where they were made
    EXPECT_TRUE(n.phase == Phase::kForward || n.prim->name() != "copy") << to_string(after, n);
  EXPECT_LT(after.nodes.size(), g.nodes.size());
}

TEST(StepPasses, FusedStepComputesTheSame) {
  test::Training t(0.1);
  std::vector<Tensor> in;
  Graph g = traced(t, in), after = g;
  run_passes(after);
  test::expect_same_sharing(after, g);
  test::expect_close(test::results(after, in), test::results(g, in), {1e-6, 1e-4, 0, 0},
                     to_string(after));
}

}  // namespace
}  // namespace tessera::compiler
