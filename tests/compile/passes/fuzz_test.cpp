// Thousands of random steps through the pipeline, against plain replay. A failure prints its seed
// and graphs; TESSERA_FUZZ_SEED runs one seed again, TESSERA_FUZZ_COUNT sets how many are run.
#include "tests/compile/passes/fuzz.h"

#include <gtest/gtest.h>

#include "tests/compile/passes/close.h"
#include "tests/compile/passes/graphs.h"

namespace tessera::compiler {
namespace {

using test::number_from;

// Where narrower floats are computed with, f64 results may come from their sums.
test::Tolerance for_graph(const Graph& g, test::Tolerance t) {
  for (const Value& v : g.values)
    if (is_floating(v.meta.dtype) && v.meta.dtype != kF64) t.f64 = t.f32;
  return t;
}

// False after a failure.
bool run_seed(uint64_t seed, std::string_view skip, const test::Tolerance& tolerance) {
  test::RandomStep step(seed);
  std::vector<Tensor> in = test::copies(step.inputs);
  std::swap(in, step.inputs);
  Graph g = test::graph_of(step.inputs, [&] { return step.run(); }), after = g;
  std::string what = "seed " + std::to_string(seed) + "\nbefore:\n" + to_string(g);
  try {
    if (skip.empty()) decompose(after, {.softmax = seed % 2 == 0, .least_elements = 0});
    run_passes(after, skip);
    test::expect_same_sharing(after, g);
    what += "after:\n" + to_string(after);
    test::expect_close(test::results(after, in), test::results(g, in), for_graph(g, tolerance),
                       what);
  } catch (const Error& e) {
    ADD_FAILURE() << what << "\n" << e.what() << "\n" << to_string(after);
  }
  return !testing::Test::HasFailure();
}

void fuzz(uint64_t count, std::string_view skip, const test::Tolerance& tolerance) {
  uint64_t first = number_from("TESSERA_FUZZ_SEED", 1);
  if (std::getenv("TESSERA_FUZZ_SEED")) count = 1;
  count = number_from("TESSERA_FUZZ_COUNT", count);
  for (uint64_t seed = first; seed < first + count; ++seed)
    if (!run_seed(seed, skip, tolerance)) return;
}

TEST(Fuzz, CleaningUpChangesNoBit) { fuzz(2000, "decompose,accumulate,fuse", {}); }

TEST(Fuzz, FusedGraphsComputeTheSame) { fuzz(2000, "", {1e-9, 1e-4, 2e-2, 1e-1}); }

}  // namespace
}  // namespace tessera::compiler
