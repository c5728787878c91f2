#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>

#include "compile/compile.h"
#include "core/core.h"

using namespace tessera;

void drop_double_negations(compiler::Graph& graph);
extern std::atomic<int> negations_dropped;

namespace {

Tensor eager(const Tensor& x) { return exp(-(-(x * 0.5))) - (-(-x)); }

// Runs the compiled function until it is replayed.
compiler::CompileReport run(const compiler::CompileOptions& options) {
  auto step = compile(eager, options);
  for (int i = 0; i < 6; ++i) {
    const Tensor x = randn({8, 16});
    EXPECT_TRUE(allclose(step(x), eager(x)));
  }
  return step.report();
}

TEST(Pass, RunsOnTheGraphOfACompiledStep) {
  negations_dropped = 0;
  const auto report =
      run({.name = "negations", .passes = {{"double_negations", drop_double_negations}}});
  EXPECT_GT(report.replays, 0) << report.why_not;
  EXPECT_EQ(report.unoptimised, "");
  EXPECT_EQ(negations_dropped, 2);
}

TEST(Pass, MayBeLeftOutByItsName) {
  negations_dropped = 0;
  run({.skip = "double_negations", .passes = {{"double_negations", drop_double_negations}}});
  EXPECT_EQ(negations_dropped, 0);
  EXPECT_THROW(run({.skip = "double_negations"}), UserError);
}

TEST(Pass, ThatFailsIsNamedAndTheGraphRunsAsItWasRecorded) {
  const auto report = run(
      {.passes = {{"fails", [](compiler::Graph&) { throw std::runtime_error("on purpose"); }}}});
  EXPECT_GT(report.replays, 0) << report.why_not;
  EXPECT_EQ(report.unoptimised, "pass fails: on purpose");
}

}  // namespace
