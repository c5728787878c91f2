// What a rank that makes another call, dies, stalls or throws does to its peers, with ranks as
// threads: an error on every rank that names the culprit, soon, and never a hang.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <latch>
#include <mutex>
#include <thread>

#include "collectives/decorators/fault.h"
#include "collectives/loopback/run_ranks.h"
#include "collectives/rendezvous.h"
#include "collectives/store/liveness.h"
#include "collectives/store/memory_store.h"
#include "tests/collectives/verbs.h"
#include "tests/support/printed.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point t) {
  return std::chrono::duration<double>(Clock::now() - t).count();
}

/// Runs `body` on n ranks; holds the CommError of each rank ("" for none), and the time it took.
struct Outcome {
  std::vector<std::string> errors;
  std::vector<std::vector<int>> blamed;
  double seconds = 0;
};
Outcome run_and_collect(int n, FunctionRef<void(ProcessGroup&)> body, RunOptions options = {}) {
  Outcome out{std::vector<std::string>(size_t(n)), std::vector<std::vector<int>>(size_t(n)), 0};
  auto start = Clock::now();
  auto note = [&](ProcessGroup& g, const CommError& e) {
    out.errors[size_t(g.rank())] = e.what();
    out.blamed[size_t(g.rank())] = e.ranks();
  };
  auto rank = [&](ProcessGroup& g) {
    try {
      body(g);
    } catch (const CommError& e) {
      note(g, e);
      EXPECT_THROW(g.barrier(), CommError);  // the group stays dead
      return;
    }
    try {  // a rank that had done its part sees it at its next call
      g.barrier();
    } catch (const CommError& e) {
      note(g, e);
    }
  };
  try {
    run_ranks(n, rank, options);
  } catch (const CommError&) {  // which is in `out` as well
  }
  out.seconds = seconds_since(start);
  return out;
}

// Expects that no deadline was needed: it is a minute away, and the error would name it.
void expect_found_out(const Outcome& o) {
  EXPECT_LT(o.seconds, 30);
  for (const std::string& e : o.errors) EXPECT_EQ(e.find("not seen for"), std::string::npos) << e;
}

bool reduces(CollKind k) {
  return k == CollKind::kAllReduce || k == CollKind::kReduce || k == CollKind::kReduceScatter;
}
bool has_root(CollKind k) {
  return k == CollKind::kReduce || k == CollKind::kBroadcast || k == CollKind::kGather ||
         k == CollKind::kScatter;
}

class Mismatch : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (GetParam() == "gloo" && !test::kHaveGloo) GTEST_SKIP() << "Gloo is left out of this build";
  }
};

TEST_P(Mismatch, EveryKindOfEveryVerbIsAnErrorOnEveryRank) {
  const char* differ[] = {"", "kind", "operator", "dtype", "count", "root"};
  for (int k = 0; k < kNumCollKinds; ++k)
    for (int variant = 1; variant <= 5; ++variant) {
      auto kind = CollKind(k);
      bool p2p = kind >= CollKind::kSend;
      if (variant == 2 && !reduces(kind)) continue;
      if (variant == 5 && !has_root(kind)) continue;
      if (kind == CollKind::kBarrier && variant > 1) continue;
      SCOPED_TRACE(fmt::format("{} {}", name_of(kind), differ[variant]));
      Outcome o =
          run_and_collect(3,
                          [&](ProcessGroup& g) {
                            g.barrier();
                            test::call_variant(g, kind, variant, kind == CollKind::kSend ? 0 : 1);
                          },
                          {.backend = GetParam()});
      expect_found_out(o);
      for (const std::string& e : o.errors) {
        EXPECT_NE(e.find(p2p && variant > 1 ? "make both equal" : differ[variant]),
                  std::string::npos)
            << e;
        EXPECT_NE(e.find("verbs.cpp:"), std::string::npos) << e;
        EXPECT_NE(e.find("verbs.cpp:", e.find("verbs.cpp:") + 1), std::string::npos) << e;
      }
    }
}

TEST_P(Mismatch, AnotherCallSiteOrAMissedCallIsOne) {
  Outcome o = run_and_collect(2,
                              [](ProcessGroup& g) {
                                Tensor t = empty({4});
                                if (g.rank() == 0)
                                  g.all_reduce(t);
                                else
                                  g.all_reduce(t);
                              },
                              {.backend = GetParam()});
  for (const std::string& e : o.errors)
    EXPECT_NE(e.find("differ in call site; let all ranks share one line, or pass `site`"),
              std::string::npos)
        << e;
  o = run_and_collect(3,
                      [](ProcessGroup& g) {
                        Tensor t = empty({4});
                        for (int i = 0; i < 3; ++i)
                          if (g.rank() != 2 || i != 1) g.all_reduce(t);
                      },
                      {.backend = GetParam()});
  for (const std::string& e : o.errors)
    EXPECT_NE(e.find("rank 2 called barrier"), std::string::npos) << e;
  for (const auto& ranks : o.blamed) EXPECT_EQ(ranks, std::vector<int>{2});
}

TEST_P(Mismatch, SplitsThatDoNotAgree) {
  Outcome o =
      run_and_collect(2,
                      [](ProcessGroup& g) {
                        Tensor in = empty({4}), out = empty({4});
                        std::vector<int64_t> give =
                            g.rank() == 0 ? std::vector<int64_t>{1, 3} : std::vector<int64_t>{2, 2};
                        std::vector<int64_t> take =
                            g.rank() == 0 ? std::vector<int64_t>{1, 3} : std::vector<int64_t>{2, 2};
                        g.all_to_all(out, in, take, give);
                      },
                      {.backend = GetParam()});
  for (const std::string& e : o.errors) EXPECT_NE(e.find("which expects"), std::string::npos) << e;
}

TEST_P(Mismatch, NothingIsWritten) {
  run_and_collect(2,
                  [](ProcessGroup& g) {
                    Tensor t = empty({4});
                    std::fill_n(t.data<float>(), 4, 1.0f);
                    try {
                      g.all_reduce(t, g.rank() ? ReduceOp::kSum : ReduceOp::kMax);
                      ADD_FAILURE();
                    } catch (const CommError&) {
                      for (int i = 0; i < 4; ++i)
                        EXPECT_EQ(static_cast<float*>(t.storage()->data())[i], 1.0f);
                      throw;
                    }
                  },
                  {.backend = GetParam()});
}

TEST_P(Mismatch, TwoSendsToEachOtherAreNamed) {
  Outcome o = run_and_collect(2, [](ProcessGroup& g) { g.send(empty({4}), 1 - g.rank()); },
                              {.backend = GetParam()});
  expect_found_out(o);
  for (const std::string& e : o.errors) EXPECT_NE(e.find("must be a recv"), std::string::npos) << e;
}

// A rank with a receive in progress may be about to send; only a rank that its own call blocks is
// known not to.
TEST_P(Mismatch, ReceivesPostedEarlyAreNoDeadlock) {
  Outcome o = run_and_collect(2,
                              [](ProcessGroup& g) {
                                int peer = 1 - g.rank();
                                Tensor in = empty({4}), out = empty({4});
                                std::fill_n(out.data<float>(), 4, 1.0f + float(g.rank()));
                                Ref<Work> arriving = g.recv_async(in, peer);
                                std::this_thread::sleep_for(Millis(700));
                                g.send_async(out, peer);
                                arriving->wait();
                                EXPECT_EQ(in.data<float>()[3], 1.0f + float(peer));
                                g.barrier();
                              },
                              {.backend = GetParam()});
  for (const std::string& e : o.errors) EXPECT_EQ(e, "");
}

INSTANTIATE_TEST_SUITE_P(Backends, Mismatch, testing::Values("loopback", "gloo"),
                         [](const auto& p) { return p.param; });

TEST(Faults, DestroyingAGroupThatDiedLogsWhyAndThrowsNothing) {
  testing::internal::CaptureStderr();
  auto body = [](ProcessGroup& g) {
    if (g.rank() == 0) g.abort("out of data");
    Tensor t = empty({4});
    Ref<Work> unread;
    try {
      unread = g.all_reduce_async(t);  // rank 1 may only learn of it by its result
    } catch (const CommError&) {
    }
    destroy_process_group();
    EXPECT_EQ(world().size(), 1) << "the old world is still there";
  };
  EXPECT_THROW(run_ranks(2, body), CommError);  // it looks at the group as well
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("destroy_process_group: world: rank 0 aborted the group: out of data"),
            std::string::npos)
      << log;
}

// tlaunch names those ranks first. A rank that gives up names the ranks of its first failure, in
// whatever group that was; here rank 3 of the world, which made another call.
TEST(Faults, AnAbortTellsTheRanksThatThisRankFailedOnFirst) {
  auto store = std::make_shared<MemoryStore>();
  std::latch failed(4), looked(1);
  auto rank = [&](int r) {
    Ref<ProcessGroup> all =
        detail::join_by_store(detail::make_world("world", r, 4), {.backend = "shm",
                                                                  .store = store,
                                                                  .prefix = "pg/",
                                                                  .timeout = Millis(60'000),
                                                                  .join_timeout = Millis(60'000)});
    Ref<ProcessGroup> half = all->split(r / 2), pair = all->split(r / 2);
    Tensor t = empty({4});
    Ref<Work> unread = r == 3 ? all->barrier_async() : all->all_reduce_async(t);
    if (r == 0) {
      EXPECT_THROW(half->all_reduce(t), CommError);  // as its operand is that of a dead call
      half->abort("the operand is lost");
      EXPECT_EQ(cause_of_failure(*store), std::vector<int>{3});
    }
    EXPECT_THROW(unread->wait(), CommError);
    failed.arrive_and_wait();
    if (r == 2) {
      pair->abort("the disk is full");
      EXPECT_EQ(cause_of_failure(*store), std::vector<int>{3});
      looked.count_down();
    }
    looked.wait();
  };
  std::vector<std::thread> others;
  for (int r = 1; r < 4; ++r) others.emplace_back(rank, r);
  rank(0);
  for (std::thread& other : others) other.join();
}

TEST(Faults, ARankThatThrowsGivesItsTextToThePeers) {
  std::atomic<int> told{0};
  auto start = Clock::now();
  try {
    run_ranks(3, [&](ProcessGroup& g) {
      if (g.rank() == 1) throw UserError("batch: file missing");
      try {
        g.all_reduce(empty({4}));
      } catch (const CommError& e) {
        told += std::string(e.what()).find("batch: file missing") != std::string::npos;
        EXPECT_EQ(e.ranks(), std::vector<int>{1});
        throw;
      }
    });
    FAIL();
  } catch (const UserError& e) {
    EXPECT_STREQ(e.what(), "batch: file missing");
  }
  EXPECT_EQ(told, 2);
  EXPECT_LT(seconds_since(start), 30);  // the deadline is a minute away
}

TEST(Faults, ARankThatLeavesIsNamed) {
  Outcome o = run_and_collect(2, [](ProcessGroup& g) {
    Ref<ProcessGroup> part = g.split(0);
    if (g.rank() == 1) return;
    try {
      part->barrier();
      ADD_FAILURE();
    } catch (const CommError& e) {
      EXPECT_NE(std::string(e.what()).find("rank 1 is gone, it has left"), std::string::npos)
          << e.what();
    }
  });
  expect_found_out(o);
}

TEST(Faults, ALateRankIsNamedAtTheDeadline) {
  std::latch failed(2);
  Outcome o = run_and_collect(3, [&](ProcessGroup& g) {
    for (int i = 0; i < 2; ++i) g.barrier();
    if (g.rank() == 2) failed.wait();
    try {
      g.all_reduce(empty({8}), ReduceOp::kSum, Millis(1000));
    } catch (const CommError&) {
      if (g.rank() != 2) failed.count_down();
      throw;
    }
  });
  EXPECT_GE(o.seconds, 1.0);
  EXPECT_LT(o.seconds, 30);  // another deadline, of a minute, was not waited for
  for (int r : {0, 1}) {
    const std::string& e = o.errors[size_t(r)];
    EXPECT_NE(e.find("all_reduce #3 on world (faults_test.cpp:"), std::string::npos) << e;
    EXPECT_GE(number_after("rank 2 not seen for ", e), 1.0) << e;
    EXPECT_NE(e.find("it last finished #2"), std::string::npos) << e;
    EXPECT_NE(e.find("ranks 0, 1 are waiting"), std::string::npos) << e;
  }
}

TEST(Faults, DelayedAndMismatchedByTheDecorator) {
  Outcome o = run_and_collect(2, [](ProcessGroup& g) {
    FaultGroup faulty{Ref<ProcessGroup>(&g), parse_fault("rank=1,op=all_reduce,n=3,mismatch")};
    for (int i = 0; i < 3; ++i) faulty.all_reduce(empty({8}));
  });
  for (const std::string& e : o.errors) {
    EXPECT_NE(e.find("rank 1 called barrier"), std::string::npos) << e;
    EXPECT_NE(e.find("#3"), std::string::npos) << e;
  }
  o = run_and_collect(2, [](ProcessGroup& g) {
    FaultGroup faulty{Ref<ProcessGroup>(&g), parse_fault("rank=0,n=2,delay=100")};
    for (int i = 0; i < 3; ++i) faulty.all_reduce(empty({8}));
  });
  EXPECT_GT(o.seconds, 0.1);
  EXPECT_EQ(o.errors[0], "");
  EXPECT_THROW(parse_fault("rank=1"), UserError);
  EXPECT_THROW(parse_fault("rank=x,kill"), UserError);
  EXPECT_THROW(parse_fault("op=all_redruce,kill"), UserError);
}

TEST(Faults, AFailedCollectiveSurfacesWhereItsResultIsRead) {
  run_and_collect(2, [](ProcessGroup& g) {
    Tensor t = empty({4});
    g.all_reduce_async(t, g.rank() ? ReduceOp::kSum : ReduceOp::kMax);
    EXPECT_THROW(t.data<float>(), CommError);
  });
}

}  // namespace
}  // namespace tessera
