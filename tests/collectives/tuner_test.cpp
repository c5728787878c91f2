// How collectives in shared memory find the fastest way.
#include "collectives/shm/tuner.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <vector>

namespace tessera::detail {
namespace {

// Runs both ranks' tuners through `calls` calls, of which way w takes us[r][w] on rank r. Every
// call follows the verdict that came with the one before. Returns the ways.
std::vector<Way> run(int64_t bytes, int calls, const double (&us)[2][3]) {
  PlaceTuner ranks[2];
  std::vector<Way> ways;
  for (int i = 0; i < calls; ++i) {
    const Way way = ranks[0].way(bytes);
    EXPECT_EQ(ranks[1].way(bytes), way) << bytes << " bytes, call " << i;
    const uint32_t published = ranks[0].verdict();
    for (int r : {0, 1}) {
      ranks[r].adopt(published);
      EXPECT_EQ(ranks[r].tries(bytes), ranks[0].tries(bytes));
    }
    for (int r : {0, 1})
      if (ranks[r].tries(bytes)) ranks[r].took(bytes, us[r][int(way)] + i % 3);
    ways.push_back(way);
  }
  return ways;
}

TEST(PlaceTuner, TriesEachWayAndKeepsTheFastestOfRank0) {
  constexpr double us[2][3] = {{30, 20, 10}, {10, 20, 30}};
  for (int64_t bytes : {32 << 10, 100'000, 512 << 10}) {
    std::vector<Way> ways = run(bytes, 100, us);
    EXPECT_EQ(std::set<Way>(ways.begin(), ways.begin() + 24),
              (std::set<Way>{Way::kInPlace, Way::kStreamed, Way::kStaged}));
    EXPECT_EQ(std::set<Way>(ways.begin() + 25, ways.end()), std::set<Way>{Way::kStaged}) << bytes;
  }
}

TEST(PlaceTuner, LargeOnesStayInPlaceAndSmallOnesTryNothing) {
  constexpr double us[2][3] = {{30, 20, 10}, {10, 20, 30}};
  for (int64_t bytes : {1 << 20, 100 << 20}) {
    std::vector<Way> ways = run(bytes, 100, us);
    EXPECT_EQ(std::count(ways.begin(), ways.end(), Way::kStaged), 0);
    EXPECT_EQ(ways.back(), Way::kStreamed) << bytes;
  }
  EXPECT_EQ(run(16 << 10, 30, us), std::vector<Way>(30, Way::kInPlace));
}

TEST(PlaceTuner, SizesHaveVerdictsOfTheirOwn) {
  PlaceTuner tuner;
  for (int64_t bytes : {64 << 10, 256 << 10, 4 << 20})
    while (tuner.tries(bytes)) {
      const int way = int(tuner.way(bytes)), best = bytes == 64 << 10 ? 2 : bytes == 256 << 10;
      tuner.took(bytes, way == best ? 1 : 2);
    }
  tuner.adopt(tuner.verdict());
  EXPECT_EQ(tuner.way(64 << 10), Way::kStaged);
  EXPECT_EQ(tuner.way(256 << 10), Way::kStreamed);
  EXPECT_EQ(tuner.way(4 << 20), Way::kInPlace);
}

// The buckets of a step, which are of one class, take turns. They differ in size, and some find
// their memory in a cache; each way must be judged by all of them.
TEST(PlaceTuner, BucketsThatTakeTurnsMeetEachWay) {
  struct Bucket {
    int64_t bytes;
    double ns_a_byte;  // in place
  };
  const Bucket large{1'900'000, 1}, small{1'100'000, 1}, cold{1'100'000, 3};
  for (const std::vector<Bucket>& step :
       {std::vector{large, small}, std::vector{cold, small}, std::vector{cold, large, small},
        std::vector{cold, large, large, small}}) {
    PlaceTuner tuner;
    for (size_t i = 0; tuner.tries(step[0].bytes); ++i) {
      const Bucket& b = step[i % step.size()];
      const double dearer = tuner.way(b.bytes) == Way::kInPlace ? 1 : 1.1;
      tuner.took(b.bytes, double(b.bytes) * b.ns_a_byte * dearer / 1000);
    }
    tuner.adopt(tuner.verdict());
    EXPECT_EQ(tuner.way(step[0].bytes), Way::kInPlace) << step.size() << " buckets";
  }
}

// Windows of one class whose sizes take turns: each size meets both ways.
TEST(StageTuner, WindowsThatTakeTurnsMeetEachWay) {
  const std::vector<int64_t> steps[] = {{60'000, 40'000}, {60'000, 50'000, 40'000, 33'000}};
  for (const std::vector<int64_t>& step : steps) {
    StageTuner tuner;
    std::map<int64_t, std::set<bool>> ways;
    for (int trial = 0; trial < 16; ++trial) {
      const int64_t bytes = step[size_t(trial) % step.size()];
      ways[bytes].insert(tuner.past_caches(bytes));
      tuner.done();
    }
    for (int64_t bytes : step) EXPECT_EQ(ways[bytes].size(), 2u) << bytes << " bytes";
  }
}

}  // namespace
}  // namespace tessera::detail
