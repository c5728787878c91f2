// Any op, any shapes, any mesh, any layouts: what ranks compute together equals what one computes
// alone, forward and backward.
#include <gtest/gtest.h>

#include <atomic>
#include <iterator>

#include "collectives/loopback/run_ranks.h"
#include "tests/dtensor/cases.h"

namespace tessera::test {
namespace {

struct Counts {
  std::atomic<int> cases{0}, free{0}, gradients{0}, refused{0};
};

void count(const Outcome& o, ProcessGroup& group, Counts& counts) {
  if (group.rank() != 0) return;
  ++counts.cases;
  counts.free += o.free;
  counts.gradients += o.gradients > 0;
  counts.refused += o.refused;
}

// Every rank draws the same numbers, so all make the same calls.
constexpr int kRanks[] = {1, 2, 3, 4, 5, 6, 8};
// Random cases for each number of ranks. Sanitizers run them many times slower, and look at paths
// rather than values: fewer cases go down the same ones.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kRandomCases = 300;
#else
constexpr int kRandomCases = 1200;
#endif

TEST(DTensorFuzz, EveryRegisteredOpEqualsDense) {
  Counts counts;
  for (int ranks : kRanks)
    run_ranks(ranks, [&](ProcessGroup& group) {
      std::vector<DeviceMesh> meshes = make_meshes(group);
      Random random{uint64_t(ranks)};
      for (const Case& c : registry_cases())
        for (const DeviceMesh& mesh : meshes) count(check_case(c, mesh, random), group, counts);
    });
  RecordProperty("cases", counts.cases);
  EXPECT_GT(counts.cases, 3000);
  EXPECT_GT(counts.free, counts.cases / 4);
  EXPECT_GT(counts.gradients, counts.cases / 4);
  EXPECT_LT(counts.refused, counts.cases / 50);
}

TEST(DTensorFuzz, RandomShapesEqualDense) {
  Counts counts;
  for (int ranks : kRanks)
    run_ranks(ranks, [&](ProcessGroup& group) {
      std::vector<DeviceMesh> meshes = make_meshes(group);
      Random random{100 + uint64_t(ranks)};
      for (int i = 0; i < kRandomCases; ++i) {
        Case c = random_case(random);
        const DeviceMesh& mesh = meshes[size_t(pick(random, 0, int64_t(meshes.size()) - 1))];
        count(check_case(c, mesh, random), group, counts);
      }
    });
  RecordProperty("cases", counts.cases);
  EXPECT_EQ(counts.cases, int(std::size(kRanks)) * kRandomCases);
  EXPECT_GT(counts.free, counts.cases / 4);
  EXPECT_GT(counts.gradients, counts.cases / 2);
}

}  // namespace
}  // namespace tessera::test
