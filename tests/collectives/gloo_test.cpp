// The TCP backend with ranks as threads.
#include <gtest/gtest.h>

#include <cmath>

#include "collectives/loopback/run_ranks.h"
#include "tests/collectives/verbs.h"

namespace tessera {
namespace {

const RunOptions kGloo{.backend = "gloo"};

class Gloo : public testing::Test {
 protected:
  void SetUp() override {
    if (!test::kHaveGloo) GTEST_SKIP() << "Gloo is left out of this build";
  }
};

TEST_F(Gloo, EveryVerbAndDtypeIsRight) {
  for (int size : {1, 2, 3, 4, 8})
    run_ranks(
        size, [](ProcessGroup& g) { test::check_all_verbs(g, 5); }, kGloo);
}

TEST_F(Gloo, LargeAndEmptyTensors) {
  for (int size : {2, 3})
    run_ranks(
        size,
        [](ProcessGroup& g) {
          test::check_verbs(g, kF32, 150'001);
          test::check_verbs(g, kF32, 0);
        },
        kGloo);
}

TEST_F(Gloo, SumsEqualThoseOfSharedMemoryBitForBit) {
  for (int size = 2; size <= 5; ++size)
    for (int64_t n : {100, 100'000}) {
      auto sums = [&](const RunOptions& options) {
        std::vector<float> result(static_cast<size_t>(n));
        run_ranks(
            size,
            [&](ProcessGroup& g) {
              Tensor t = empty({n});
              for (int64_t i = 0; i < n; ++i)
                t.data<float>()[i] = std::sin(float(g.rank() * 1000 + i));
              g.all_reduce(t, ReduceOp::kAvg);
              if (g.rank() == 0) std::copy_n(t.data<float>(), n, result.begin());
            },
            options);
        return result;
      };
      EXPECT_EQ(sums({}), sums(kGloo));
    }
}

TEST_F(Gloo, SplitsIntoGroupsThatWork) {
  run_ranks(
      4,
      [](ProcessGroup& g) {
        Ref<ProcessGroup> part = g.split(g.rank() % 2);
        ASSERT_EQ(part->size(), 2);
        test::check_verbs(*part, kF32, 7);
        g.barrier();
      },
      kGloo);
}

}  // namespace
}  // namespace tessera
