// Any op, any shapes, any mesh, any layouts: what ranks compute together equals what one computes
// alone, forward and backward. A failure prints its seed; tests/support/fuzz.h says how to run
// others.
#include "tests/support/fuzz.h"

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

// Every rank draws the same numbers, so all make the same calls.
Random random_of(uint64_t seed, int ranks) { return Random{64 * seed + uint64_t(ranks)}; }

// `seed`: the seed of `random`.
void check_and_count(const Case& c, const DeviceMesh& mesh, Random& random, uint64_t seed,
                     ProcessGroup& group, Counts& counts) {
  Outcome o;
  try {
    o = check_case(c, mesh, random);
  } catch (const BugError& e) {
    throw BugError(run_again(seed) + e.what());
  }
  if (group.rank() != 0) return;
  ++counts.cases;
  counts.free += o.free;
  counts.gradients += o.gradients > 0;
  counts.refused += o.refused;
}

constexpr int kRanks[] = {1, 2, 3, 4, 5, 6, 8};
// Random cases for each number of ranks. Sanitizers run them many times slower, and look at paths
// rather than values: fewer cases go down the same ones.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kRandomCases = 300;
#else
constexpr int kRandomCases = 1200;
#endif

TEST(DTensorFuzz, EveryRegisteredOpEqualsDense) {
  const FuzzSeeds seeds = fuzz_seeds(1);
  Counts counts;
  for (int ranks : kRanks)
    run_ranks(ranks, [&](ProcessGroup& group) {
      std::vector<DeviceMesh> meshes = make_meshes(group);
      const std::vector<Case> cases = registry_cases();
      for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
        Random random = random_of(seed, ranks);
        for (const Case& c : cases)
          for (const DeviceMesh& mesh : meshes)
            check_and_count(c, mesh, random, seed, group, counts);
      }
    });
  RecordProperty("cases", counts.cases);
  EXPECT_GT(counts.cases, 3000);
  EXPECT_GT(counts.free, counts.cases / 4);
  EXPECT_GT(counts.gradients, counts.cases / 4);
  EXPECT_LT(counts.refused, counts.cases / 50);
}

TEST(DTensorFuzz, RandomShapesEqualDense) {
  const FuzzSeeds seeds = fuzz_seeds(kRandomCases);
  Counts counts;
  for (int ranks : kRanks)
    run_ranks(ranks, [&](ProcessGroup& group) {
      std::vector<DeviceMesh> meshes = make_meshes(group);
      for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
        Random random = random_of(seed, ranks);
        Case c = random_case(random);
        const DeviceMesh& mesh = meshes[size_t(pick(random, 0, int64_t(meshes.size()) - 1))];
        check_and_count(c, mesh, random, seed, group, counts);
      }
    });
  RecordProperty("cases", counts.cases);
  EXPECT_EQ(uint64_t(counts.cases), std::size(kRanks) * seeds.count);
  if (!seeds.many()) return;
  EXPECT_GT(counts.free, counts.cases / 4);
  EXPECT_GT(counts.gradients, counts.cases / 2);
}

}  // namespace
}  // namespace tessera::test
