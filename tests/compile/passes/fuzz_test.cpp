// Runs thousands of random steps through the pipeline and compares them with plain replay. A
// failure prints its seed and graphs; tests/support/fuzz.h says how to run others.
#include "tests/compile/passes/fuzz.h"

#include <gtest/gtest.h>

#include "tests/compile/passes/close.h"
#include "tests/compile/passes/graphs.h"
#include "tests/support/fuzz.h"

namespace tessera::compiler {
namespace {

// By result (test::results: outputs, implicit inputs, inputs): whether its final value was computed
// with floats narrower than f64 anywhere before. An f64 result may then have their rounding errors.
std::vector<bool> from_narrow(const Graph& g) {
  std::vector<bool> narrow(g.values.size(), false);  // by buffer
  auto is_narrow = [&](ValueId id) {
    const Value& v = g[id];
    return (is_floating(v.meta.dtype) && v.meta.dtype != kF64) ||
           (v.buffer != kNoBuffer && narrow[size_t(v.buffer)]);
  };
  for (const Node& n : g.nodes) {
    const bool any = std::ranges::any_of(n.in, is_narrow) || std::ranges::any_of(n.out, is_narrow);
    for (ValueId id : n.out)
      if (any && g[id].buffer != kNoBuffer) narrow[size_t(g[id].buffer)] = true;
  }
  std::vector<bool> of;
  for (ValueId id : g.outputs) of.push_back(is_narrow(id));
  for (const ImplicitInput& x : g.implicit) of.push_back(is_narrow(x.id));
  for (ValueId id : g.inputs) of.push_back(is_narrow(id));
  return of;
}

void expect_close(const Graph& g, const Tensors& got, const Tensors& want,
                  const test::Tolerance& tolerance, const std::string& what) {
  const std::vector<bool> narrow = from_narrow(g);
  ASSERT_EQ(got.size(), want.size());
  ASSERT_EQ(narrow.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    test::Tolerance t = tolerance;
    if (narrow[i]) t.f64 = t.f32;
    test::expect_close(got[i], want[i], t, what + "result " + std::to_string(i));
  }
}

// False after a failure.
bool run_seed(uint64_t seed, std::string_view skip, const test::Tolerance& tolerance) {
  test::RandomStep step(seed);
  std::vector<Tensor> in = test::copies(step.inputs);
  std::swap(in, step.inputs);
  Graph g = test::graph_of(step.inputs, [&] { return step.run(); }), after = g;
  std::string what = test::run_again(seed) + "before:\n" + to_string(g);
  try {
    if (skip.empty()) decompose(after, {.softmax = seed % 2 == 0, .least_elements = 0});
    run_passes(after, skip);
    test::expect_same_sharing(after, g);
    what += "after:\n" + to_string(after);
    expect_close(g, test::results(after, in), test::results(g, in), tolerance, what);
  } catch (const Error& e) {
    ADD_FAILURE() << what << "\n" << e.what() << "\n" << to_string(after);
  }
  return !testing::Test::HasFailure();
}

void fuzz(uint64_t count, std::string_view skip, const test::Tolerance& tolerance) {
  const test::FuzzSeeds seeds = test::fuzz_seeds(count);
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed)
    if (!run_seed(seed, skip, tolerance)) return;
}

TEST(Fuzz, CleaningUpChangesNoBit) { fuzz(2000, "decompose,accumulate,fuse", {}); }

TEST(Fuzz, FusedGraphsComputeTheSame) { fuzz(2000, "", {1e-9, 1e-4, 2e-2, 1e-1}); }

}  // namespace
}  // namespace tessera::compiler
