// The TCP backend with ranks as threads.
#include <gtest/gtest.h>
#include <sched.h>

#include <cmath>
#include <filesystem>
#include <future>
#include <thread>

#include "collectives/loopback/run_ranks.h"
#include "collectives/rendezvous.h"
#include "collectives/store/liveness.h"
#include "collectives/store/memory_store.h"
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
          for (int64_t n : {150'001, 2061, 0}) test::check_verbs(g, kF32, n);
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

// When Gloo's I/O thread is woken, it lets the other threads of its CPU go on, one of which may
// hold the lock that it would poll for.
TEST_F(Gloo, ItsThreadInterruptsNoOther) {
  bool settable = false;
  std::thread([&] {
    const sched_param none{};
    settable =
        sched_setscheduler(0, SCHED_BATCH, &none) == 0 && sched_getscheduler(0) == SCHED_BATCH;
  }).join();
  if (!settable) GTEST_SKIP() << "this system sets no policy";
  auto batch_threads = [] {
    int n = 0;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task"))
      n += sched_getscheduler(std::stoi(task.path().filename())) == SCHED_BATCH;
    return n;
  };
  ASSERT_EQ(batch_threads(), 0);
  run_ranks(
      2,
      [&](ProcessGroup& g) {
        g.barrier();
        EXPECT_EQ(batch_threads(), 2);
        EXPECT_EQ(sched_getscheduler(0), SCHED_OTHER);
        g.barrier();
      },
      kGloo);
}

// The connection stays open here, as it may where the system still holds bytes for a rank that has
// ended: the launcher's announcement ends the wait.
TEST_F(Gloo, ADeathThatTheLauncherAnnouncesEndsTheWait) {
  auto store = std::make_shared<MemoryStore>();
  std::string text;
  std::promise<void> seen;
  auto rank = [&](int r) {
    Ref<ProcessGroup> g =
        detail::join_by_store(detail::make_world("world", r, 2), {.backend = "gloo",
                                                                  .store = store,
                                                                  .prefix = "pg/",
                                                                  .timeout = Millis(120'000),
                                                                  .join_timeout = Millis(60'000)});
    g->barrier();
    if (r == 1) return seen.get_future().wait();
    announce_death(*store, 1, "signal 9 (Killed)");
    try {
      g->barrier();
    } catch (const CommError& e) {
      text = e.what();
      EXPECT_EQ(e.ranks(), std::vector<int>{1});
    }
    seen.set_value();
  };
  auto start = std::chrono::steady_clock::now();
  std::thread other(rank, 1);
  rank(0);
  other.join();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60));
  EXPECT_NE(text.find("rank 1 is gone, signal 9 (Killed)"), std::string::npos) << text;
}

}  // namespace
}  // namespace tessera
