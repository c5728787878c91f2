// The cases at real sizes (tests/support/large_cases.h) on sharded operands: results and gradients
// are compared with those of plain ones.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>

#include "collectives/loopback/run_ranks.h"
#include "tests/dtensor/cases.h"
#include "tests/support/large_cases.h"

namespace tessera::test {
namespace {

// The sharded and the plain result may each be off by the bound, in opposite directions.
std::vector<Case> cases_of(const LargeCases& large, DType t = kF64) {
  std::vector<Case> cases;
  for (const LargeCase& c : large) {
    if (size_of(t) == 2 && c.roundings == 0) continue;
    if (c.jumps) continue;
    int64_t most = 0;
    for (const Tensor& t : c.in) most = std::max(most, t.numel());
    if (most > 1 << 20) continue;  // their size is a matter of one rank's kernels
    auto run = [c](const List& in) {
      ReplicatePlain same;
      seed(c);
      return c.f(in);
    };
    const bool exact = c.name.find("in a fixed tree") != std::string::npos;
    cases.push_back({c.name, operands_in(c, t), run, c.gradients && !c.ties, exact});
    cases.back().tolerance = [c](DType of) { return 2 * tolerance(c, of, true); };
    cases.back().terms = c.length;
  }
  return cases;
}

class DTensorLarge : public testing::TestWithParam<DType> {};

TEST_P(DTensorLarge, AnyLayoutEqualsPlain) {
  LargeCases large;
  for (auto add : {add_reductions, add_rows, add_attention, add_products, add_elementwise,
                   add_windows, add_linalg, add_generated})
    add(large);
  if (GetParam() == kF32) add_f32_convolutions(large);
  if (GetParam() == kBF16) add_bf16_convolutions(large);
  const std::vector<Case> cases = cases_of(large, GetParam());
  std::atomic<int> free = 0, gradients = 0, refused = 0;
  for (int ranks : {2, 3})
    run_ranks(ranks, [&](ProcessGroup& group) {
      const DeviceMesh mesh = make_meshes(group)[0];
      Random random{uint64_t(ranks)};
      for (const Case& c : cases) {
        const Outcome o = check_case(c, mesh, random);
        if (group.rank() == 0) free += o.free, gradients += o.gradients > 0, refused += o.refused;
      }
    });
  EXPECT_GT(free, int(cases.size()) / 2);
  EXPECT_GT(gradients, int(cases.size()) / 2);
  // Cuts of an odd sum in a fixed tree.
  EXPECT_LT(refused, 2 * std::ranges::count_if(cases, &Case::may_refuse));
}

INSTANTIATE_TEST_SUITE_P(Dtypes, DTensorLarge, testing::Values(kF64, kF32, kBF16),
                         [](const auto& info) { return std::string(name_of(info.param)); });

// Parameters, gradients and state of an optimizer have the same layout.
TEST(DTensorLargeUpdates, CutEqualsWhole) {
  LargeCases large;
  add_updates(large);
  for (int ranks : {2, 3})
    run_ranks(ranks, [&](ProcessGroup& group) {
      const DeviceMesh mesh = make_meshes(group)[0];
      Random random{uint64_t(ranks)};
      for (const Case& c : cases_of(large))
        check_placed(c, mesh, std::vector<Layout>(c.in.size(), {Shard(0)}), random);
    });
}

}  // namespace
}  // namespace tessera::test
