// parallel_for: every index once, the caller sees all of it, and a failure in any piece arrives.
// Under the thread sanitizer these also show that its edges of fork and join are what it needs.
#include <gtest/gtest.h>

#include <atomic>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "core/base/boundary.h"

namespace tessera {
namespace {

// A loop without a name in the table of limits does not compile.
template <class... Args>
concept SharesALoop = requires(Args... args) {
  parallel_for(args...);
};
using Body = void (*)(int64_t, int64_t);
static_assert(SharesALoop<BoundaryName, int64_t, int64_t, Body>);
static_assert(!SharesALoop<int64_t, int64_t, Body>);

constexpr BoundaryName kLoop = "elementwise.threads";

class ParallelFor : public ::testing::Test {
 protected:
  void SetUp() override { set_num_threads(4); }
  void TearDown() override { set_num_threads(before_); }
  int before_ = num_threads();
};

TEST_F(ParallelFor, EveryIndexOnceAndSeenByTheCaller) {
  std::vector<int64_t> count(1000);
  for (int64_t grain : {int64_t(0), int64_t(1), int64_t(7), int64_t(400), int64_t(5000)}) {
    for (int64_t& c : count) ++c;  // in turn by the caller and by the threads
    parallel_for(kLoop, int64_t(count.size()), grain, [&](int64_t begin, int64_t end) {
      EXPECT_LT(begin, end);
      for (int64_t i = begin; i < end; ++i) ++count[size_t(i)];
    });
  }
  EXPECT_EQ(count, std::vector<int64_t>(1000, 10));
  parallel_for(kLoop, 0, 1, [](int64_t, int64_t) { FAIL() << "nothing to do"; });
}

TEST_F(ParallelFor, OneOfTheFailuresArrives) {
  std::atomic<int> thrown = 0;
  auto fails = [&](int64_t, int64_t) {
    ++thrown;
    throw std::runtime_error("a piece failed");
  };
  EXPECT_THROW(parallel_for(kLoop, 1000, 1, fails), std::runtime_error);
  EXPECT_GE(thrown, 1);
  std::atomic<int64_t> done = 0;
  parallel_for(kLoop, 1000, 1, [&](int64_t begin, int64_t end) { done += end - begin; });
  EXPECT_EQ(done, 1000) << "the next loop runs";
}

TEST_F(ParallelFor, InsideAnotherRunsInline) {
  std::vector<int64_t> rows(64);
  parallel_for(kLoop, 64, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      parallel_for(kLoop, 100, 1, [&](int64_t b, int64_t e) {
        EXPECT_EQ(e - b, 100);
        rows[size_t(i)] += e - b;
      });
  });
  EXPECT_EQ(std::accumulate(rows.begin(), rows.end(), int64_t(0)), 6400);
}

}  // namespace
}  // namespace tessera
