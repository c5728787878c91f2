// The sampler: permutations are bijections, every deal of every world size is the same global
// sequence.
#include "core/data/sampler.h"

#include <map>
#include <numeric>
#include <set>

#include "core/data/permutation.h"
#include "tests/support/temp_folder.h"

namespace tessera::data {
namespace {

TEST(Permute, IsABijectionForEverySize) {
  for (int64_t n = 1; n <= 130; ++n)
    for (uint64_t epoch : {0, 1}) {
      std::set<int64_t> seen;
      for (int64_t i = 0; i < n; ++i) {
        int64_t j = permute(i, n, 9, epoch);
        ASSERT_GE(j, 0);
        ASSERT_LT(j, n);
        seen.insert(j);
      }
      ASSERT_EQ(int64_t(seen.size()), n);
    }
  std::vector<bool> hit(100'003);
  for (int64_t i = 0; i < 100'003; ++i) hit[size_t(permute(i, 100'003, 1, 0))] = true;
  EXPECT_EQ(std::count(hit.begin(), hit.end(), true), 100'003);
  int64_t huge = int64_t(1) << 61;
  EXPECT_LT(permute(huge - 1, huge, 1, 0), huge);
}

// All 24 orders of 4 items, the smallest whole domain, come about equally often: chi-square with 23
// degrees of freedom.
TEST(Permute, OrdersAreUniform) {
  std::map<std::string, int> count;
  constexpr int kDraws = 24'000;
  for (int seed = 0; seed < kDraws; ++seed) {
    std::string order;
    for (int64_t i = 0; i < 4; ++i) order += char('0' + permute(i, 4, uint64_t(seed), 0));
    ++count[order];
  }
  double chi = 0, expected = double(kDraws) / double(count.size());
  for (auto& [order, c] : count) chi += (c - expected) * (c - expected) / expected;
  EXPECT_EQ(count.size(), 24u);
  EXPECT_LT(chi, 60);
}

TEST(Permute, PositionsAreUniform) {
  constexpr int64_t n = 10;
  constexpr int kDraws = 20'000;
  for (int64_t i : {0, 5, 9}) {
    std::vector<int> count(n);
    for (int seed = 0; seed < kDraws; ++seed) ++count[size_t(permute(i, n, uint64_t(seed), 3))];
    double chi = 0;
    for (int c : count) chi += (c - kDraws / 10.0) * (c - kDraws / 10.0) / (kDraws / 10.0);
    EXPECT_LT(chi, 35) << i;  // 9 degrees of freedom: 1 in 20,000
  }
}

// The sample numbers of each leaf, over `steps` steps and all ranks.
using Steps = std::vector<std::map<int64_t, std::vector<Sample>>>;
Steps deal(int world_size, Deal d, int64_t steps, SamplerOptions o) {
  Steps out{size_t(steps)};
  for (int rank = 0; rank < world_size; ++rank) {
    o.rank = rank;
    o.world_size = world_size;
    o.deal = d;
    DistributedSampler s(o);
    for (auto& step : out)
      for (int64_t k = 0; k < s.micro_batches_per_rank(); ++k) {
        int64_t leaf = dealt_leaf(d, rank, world_size, s.micro_batches_per_rank(), k);
        EXPECT_TRUE(step.emplace(leaf, s.next()).second);
      }
    EXPECT_EQ(s.cursor(), steps * s.samples_per_step());
  }
  return out;
}

TEST(Sampler, SameGlobalOrderOnAnyWorldSizeAndDeal) {
  SamplerOptions o{
      .dataset_size = 37, .micro_batches = 8, .micro_batch_size = 3, .seed = 5, .repeat = true};
  Steps serial = deal(1, Deal::kAccumulateThenReduce, 6, o);
  for (int world_size : {1, 2, 4, 8})
    for (Deal d : {Deal::kAccumulateThenReduce, Deal::kReduceThenAccumulate})
      EXPECT_EQ(deal(world_size, d, 6, o), serial) << world_size;
  int64_t expected = 0;
  std::map<int64_t, int> uses;
  for (auto& step : serial)
    for (auto& [leaf, samples] : step)
      for (const Sample& s : samples) {
        EXPECT_EQ(s.number, expected++);
        if (s.number < 111) ++uses[s.index];
      }
  EXPECT_EQ(uses.size(), 37u);  // three whole passes: each item three times
  for (auto& [index, n] : uses) EXPECT_EQ(n, 3);
}

TEST(Sampler, DealsAreThoseOfTheContract) {
  for (int r = 0; r < 4; ++r)
    for (int k = 0; k < 2; ++k) {
      EXPECT_EQ(dealt_leaf(Deal::kAccumulateThenReduce, r, 4, 2, k), r * 2 + k);
      EXPECT_EQ(dealt_leaf(Deal::kReduceThenAccumulate, r, 4, 2, k), k * 4 + r);
    }
}

// Summing as each plan does must be one tree over leaves: strings in place of numbers show the
// brackets.
TEST(Sampler, BothDealsAreOneTree) {
  auto tree = [](std::vector<std::string> v) {
    while (v.size() > 1) {
      std::vector<std::string> up;
      for (size_t i = 0; i < v.size(); i += 2) up.push_back("(" + v[i] + "+" + v[i + 1] + ")");
      v = up;
    }
    return v[0];
  };
  std::vector<std::string> leaves;
  for (int i = 0; i < 8; ++i) leaves.push_back(std::to_string(i));
  for (int64_t ranks : {1, 2, 4, 8}) {
    int64_t per_rank = 8 / ranks;
    std::vector<std::string> over_ranks, over_rounds;
    for (int64_t r = 0; r < ranks; ++r) {
      std::vector<std::string> own;
      for (int64_t k = 0; k < per_rank; ++k)
        own.push_back(
            leaves[size_t(dealt_leaf(Deal::kAccumulateThenReduce, r, ranks, per_rank, k))]);
      over_ranks.push_back(tree(own));
    }
    EXPECT_EQ(tree(over_ranks), tree(leaves));
    for (int64_t k = 0; k < per_rank; ++k) {
      std::vector<std::string> round;
      for (int64_t r = 0; r < ranks; ++r)
        round.push_back(
            leaves[size_t(dealt_leaf(Deal::kReduceThenAccumulate, r, ranks, per_rank, k))]);
      over_rounds.push_back(tree(round));
    }
    EXPECT_EQ(tree(over_rounds), tree(leaves));
  }
}

TEST(Sampler, OnePassTakesEveryItemOnceOnAnyWorldSize) {
  for (int world_size : {1, 2, 3, 4, 8})
    for (bool shuffle : {false, true}) {
      std::set<int64_t> seen;
      std::set<int> rounds;
      size_t total = 0;
      for (int rank = 0; rank < world_size; ++rank) {
        DistributedSampler s({.dataset_size = 29,
                              .micro_batch_size = 4,
                              .rank = rank,
                              .world_size = world_size,
                              .shuffle = shuffle});
        int n = 0;
        for (; !s.done(); ++n)
          for (const Sample& x : s.next()) seen.insert(x.index), ++total;
        rounds.insert(n);
        expect_contains(error_of([&] { s.next(); }), "all 29 samples");
      }
      EXPECT_EQ(seen.size(), 29u);
      EXPECT_EQ(total, 29u);
      EXPECT_EQ(rounds.size(), 1u) << "ranks must take the same number of steps";
    }
}

// A cursor at the end of a pass is the beginning of the next, whatever steps lay between.
TEST(Sampler, PassesFollowEachOther) {
  for (int world_size : {1, 2, 3}) {
    std::vector<std::set<int64_t>> passes(3);
    for (int rank = 0; rank < world_size; ++rank) {
      DistributedSampler s({.dataset_size = 10,
                            .micro_batch_size = 4,
                            .rank = rank,
                            .world_size = world_size,
                            .seed = 2});
      for (size_t pass = 0; pass < 3; ++pass) {
        EXPECT_EQ(s.pass_end(), int64_t(pass + 1) * 10);
        while (!s.done())
          for (const Sample& x : s.next()) {
            EXPECT_EQ(x, s.sample(x.number));
            EXPECT_TRUE(passes[pass].insert(x.number).second);
          }
        EXPECT_EQ(s.cursor(), s.pass_end());
        s.seek(s.cursor());
      }
    }
    for (size_t pass = 0; pass < 3; ++pass) {
      EXPECT_EQ(passes[pass].size(), 10u);
      EXPECT_EQ(*passes[pass].begin(), int64_t(pass) * 10);
    }
  }
}

TEST(Sampler, DropsTheStepThatWouldBeShort) {
  DistributedSampler s({.dataset_size = 10, .micro_batch_size = 4, .drop_last = true});
  EXPECT_EQ(s.next().size(), 4u);
  EXPECT_EQ(s.next().size(), 4u);
  EXPECT_TRUE(s.done());
  EXPECT_EQ(s.cursor(), 10);
}

TEST(Sampler, ResumesOnAnotherWorldSize) {
  SamplerOptions o{
      .dataset_size = 50, .micro_batches = 4, .micro_batch_size = 2, .seed = 3, .repeat = true};
  Steps whole = deal(1, Deal::kAccumulateThenReduce, 10, o);
  o.world_size = 2;
  o.rank = 1;
  DistributedSampler s(o);
  s.seek(6 * 8);
  EXPECT_EQ(s.next(), whole[6].at(2));
  EXPECT_EQ(s.cursor(), 48) << "in the middle of a step the cursor is the step's beginning";
  EXPECT_EQ(s.next(), whole[6].at(3));
  EXPECT_EQ(s.cursor(), 56);
  EXPECT_EQ(s.next(), whole[7].at(2));
}

TEST(Sampler, EpochsDifferAndEndlessDatasetsPassNumbersOn) {
  DistributedSampler s({.dataset_size = 100, .seed = 1});
  int same = 0;
  for (int64_t i = 0; i < 100; ++i) same += s.sample(i).index == s.sample(100 + i).index;
  EXPECT_LT(same, 10);
  DistributedSampler endless({.micro_batch_size = 3, .repeat = true});
  endless.next();
  EXPECT_EQ(endless.next()[0], (Sample{3, 3}));
  DistributedSampler ordered({.dataset_size = 4, .shuffle = false});
  EXPECT_EQ(ordered.sample(6), (Sample{6, 2}));
}

TEST(Sampler, Refuses) {
  expect_contains(error_of([] { DistributedSampler s({.rank = 2, .world_size = 2}); }),
                  "rank 2 of 2");
  expect_contains(error_of([] { DistributedSampler s({.world_size = 0}); }), "rank 0 of 0");
  expect_contains(
      error_of([] { DistributedSampler s({.micro_batches = 4, .world_size = 3, .repeat = true}); }),
      "multiple of 3");
  expect_contains(error_of([] { DistributedSampler s({.micro_batch_size = 0, .repeat = true}); }),
                  "of 0 samples");
  expect_contains(error_of([] { DistributedSampler s({}); }), "endless");
  expect_contains(error_of([] { DistributedSampler s({.dataset_size = -1}); }), "out of range");
  expect_contains(error_of([] {
                    DistributedSampler s({.dataset_size = 4, .repeat = true, .drop_last = true});
                  }),
                  "no last step");
  const SamplerOptions whole{
      .dataset_size = 8, .micro_batch_size = 4, .world_size = 2, .drop_last = true};
  EXPECT_FALSE(DistributedSampler(whole).done());
  SamplerOptions empty = whole;
  empty.dataset_size = 7;
  expect_contains(error_of([&] { DistributedSampler s(empty); }),
                  "one takes 8 (micro-batches of 4: 2, ranks: 2)");
  DistributedSampler s({.repeat = true});
  expect_contains(error_of([&] { s.pass_end(); }), "passes repeat");
  expect_contains(error_of([&] { s.seek(-1); }), "negative");
  expect_contains(error_of([&] { s.seek(INT64_MAX); }), "beyond 2^62");
}

}  // namespace
}  // namespace tessera::data
