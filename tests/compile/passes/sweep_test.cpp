// Every registered op, with its gradient, through the whole pipeline: the graph computes what it
// computed before.
#include <gtest/gtest.h>

#include "tests/compile/passes/close.h"
#include "tests/compile/passes/graphs.h"

namespace tessera::compiler {
namespace {

using test::copies, test::defined_only, test::evaluate;

void sweep(std::string_view skip, const test::Tolerance& tolerance) {
  for (const OpEntry& op : op_registry().entries()) {
    int number = 0;
    for (const Sample& s : op.samples()) {
      SCOPED_TRACE(op.name + " sample " + std::to_string(number++));
      std::vector<Tensor> in = copies(s.in);
      Graph g = test::graph_of(in, [&] { return defined_only(evaluate(s, in)); }), after = g;
      if (skip.empty()) decompose(after, {.least_elements = 0});
      run_passes(after, skip);
      test::expect_same_sharing(after, g);
      test::expect_close(test::results(after, s.in), test::results(g, s.in), tolerance,
                         "before:\n" + to_string(g) + "after:\n" + to_string(after));
    }
  }
}

TEST(PassSweep, CleaningUpChangesNoBit) { sweep("decompose,accumulate,fuse", {}); }

// Sums of a few f64 numbers in another order.
TEST(PassSweep, FusedOpsComputeTheSame) { sweep("", {1e-14, 1e-6, 1e-3, 1e-2}); }

}  // namespace
}  // namespace tessera::compiler
