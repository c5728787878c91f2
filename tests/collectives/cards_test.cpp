// Collectives on cards: each rank has one of its own, and NCCL moves its tensors. On the virtual
// GPU (ctest vgpu_collectives) its own NCCL does, whose sums are in another order than ours.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <chrono>
#include <cmath>
#include <map>
#include <thread>

#include "collectives/loopback/run_ranks.h"
#include "collectives/store/liveness.h"
#include "collectives/together.h"
#include "core/base/deterministic.h"
#include "core/base/profile.h"
#include "core/dispatch/copy.h"
#include "core/dispatch/default_device.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "tests/collectives/processes.h"
#include "tests/collectives/verbs.h"
#include "tests/support/on_card.h"
#include "tests/support/order_on_card.h"

namespace tessera {
namespace {

using test::RankProcesses;
using test::RankResult;

using Clock = std::chrono::steady_clock;

class CollectivesOnCards : public test::OnCard {
 protected:
  /// Runs ranks as threads, each with its card as the default device.
  template <class F>
  void on_cards(int n, F body, RunOptions options = {}) {
    run_ranks(
        n,
        [&](ProcessGroup& g) {
          const DeviceScope scope(card(g.rank()));
          body(g);
        },
        options);
  }
};

Tensor of(double value, int64_t n = 4) { return full({n}, value, {kF32, default_device()}); }
std::vector<float> values(const Tensor& t) {
  const Tensor host = transferred(t, kCPU);
  return {host.data<float>(), host.data<float>() + host.numel()};
}
template <class F>
std::string error_of(F body) {
  try {
    body();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "no error";
}

TEST_F(CollectivesOnCards, EveryVerbAndDtypeIsRight) {
  if (cards() < 2) GTEST_SKIP() << "2 cards are needed";
  on_cards(2, [](ProcessGroup& g) {
    test::check_all_verbs(g, 5);
    EXPECT_EQ(g.backend(default_device()), "nccl");
    test::check_verbs(g, kBF16, 50'001);
  });
}

TEST_F(CollectivesOnCards, MoreRanks) {
  for (int n : {4, 8}) {
    if (cards() < n) GTEST_SKIP() << n << " cards are needed";
    on_cards(n, [](ProcessGroup& g) {
      for (DType t : {kF32, kBool}) test::check_verbs(g, t, 5);
    });
  }
}

TEST_F(CollectivesOnCards, PartsOfAGroup) {
  if (cards() < 4) GTEST_SKIP() << "4 cards are needed";
  on_cards(4, [](ProcessGroup& g) {
    g.all_reduce(of(1));
    Ref<ProcessGroup> half = g.split(g.rank() % 2, -g.rank());
    EXPECT_EQ(half->backend(default_device()), "nccl");
    Tensor t = of(g.rank());
    half->broadcast(t, 0);
    EXPECT_EQ(values(t), std::vector<float>(4, float(2 + g.rank() % 2)));
    test::check_verbs(*half, kF32, 100);
    Ref<ProcessGroup> some = g.split(g.rank() == 3 ? -1 : 0);
    if (some) test::check_verbs(*some, kI64, 7);
    // One that was split before any collective on cards.
    Ref<ProcessGroup> alone = g.split(g.rank());
    alone->all_reduce(t);
  });
}

TEST_F(CollectivesOnCards, NoHostThreadWaitsForASynchronousVerb) {
  if (cards() < 2) GTEST_SKIP() << "2 cards are needed";
  on_cards(2, [](ProcessGroup& g) {
    Tensor t = of(1);
    g.all_reduce(t);
    g.barrier();
    // Rank 0 calls, and returns, while rank 1 has not come.
    if (g.rank() == 0) g.all_reduce(t);
    g.barrier();
    if (g.rank() == 1) g.all_reduce(t);
    EXPECT_EQ(values(t), std::vector<float>(4, 4));
  });
}

TEST_F(CollectivesOnCards, KernelsAndCollectivesFollowEachOther) {
  if (cards() < 2) GTEST_SKIP() << "2 cards are needed";
  on_cards(2, [](ProcessGroup& g) {
    Tensor sum = of(0);
    for (int i = 0; i < 20; ++i) {
      Tensor x = of(g.rank() + i) * 2.0;
      Ref<Work> work = g.all_reduce_async(x);
      sum = sum + x;
      EXPECT_EQ(work->seq(), uint64_t(i + 1));
    }
    EXPECT_EQ(values(sum), std::vector<float>(4, 2 * (20 + 2 * 190)));
  });
}

TEST_F(CollectivesOnCards, WhatIsSentMayBeOverwrittenAtOnceByALaterKernel) {
  if (cards() < 2) GTEST_SKIP() << "2 cards are needed";
  on_cards(2, [](ProcessGroup& g) {
    Tensor gathered = of(0, 8), x = of(g.rank() + 1);
    g.all_gather_async(gathered, x);
    copy_values(x, of(100));
    EXPECT_EQ(values(gathered), (std::vector<float>{1, 1, 1, 1, 2, 2, 2, 2}));
  });
}

TEST_F(CollectivesOnCards, AllMessagesOfARankProceedTogether) {
  if (cards() < 4) GTEST_SKIP() << "4 cards are needed";
  on_cards(4, [](ProcessGroup& g) {
    g.all_reduce(of(1));
    constexpr int64_t kMany = 100'000;
    std::vector<Tensor> in;
    for (int r = 0; r < 4; ++r)
      if (r != g.rank()) g.send_async(of(10 * g.rank() + r, kMany), r);
    for (int r = 0; r < 4; ++r) {
      Tensor t = of(-1, kMany);
      if (r != g.rank()) g.recv(t, r);
      in.push_back(t);
    }
    for (int r = 0; r < 4; ++r) {
      const float want = r == g.rank() ? -1 : float(10 * r + g.rank());
      EXPECT_EQ(values(in[size_t(r)]), std::vector<float>(kMany, want));
    }
  });
}

TEST_F(CollectivesOnCards, MessagesThatCrossMayBeSubmittedApart) {
  if (cards() < 2) GTEST_SKIP() << "2 cards are needed";
  on_cards(2, [](ProcessGroup& g) {
    g.all_reduce(of(1));
    constexpr int64_t kMany = 100'000;
    Tensor mine = of(g.rank(), kMany), theirs = of(-1, kMany);
    g.send_async(mine, 1 - g.rank());
    g.barrier();  // what was put off is submitted before the host waits
    g.recv(theirs, 1 - g.rank());
    EXPECT_EQ(values(theirs), std::vector<float>(kMany, float(1 - g.rank())));
  });
}

TEST_F(CollectivesOnCards, AMessageThatNobodyWaitsForArrives) {
  if (cards() < 2) GTEST_SKIP() << "2 cards are needed";
  on_cards(2, [](ProcessGroup& g) {
    g.all_reduce(of(1));
    Tensor t = of(g.rank());
    if (g.rank() == 0) g.send_async(t, 1);
    if (g.rank() == 1) {
      g.recv(t, 0);
      EXPECT_EQ(values(t), std::vector<float>(4, 0));
    }
    g.barrier();
  });
}

TEST_F(CollectivesOnCards, AMessageIsUnderWayWhileThePeerWaitsInACollective) {
  if (cards() < 2) GTEST_SKIP() << "2 cards are needed";
  on_cards(2, [](ProcessGroup& g) {
    Tensor sum = of(1), t = of(g.rank());
    g.all_reduce(sum);
    if (g.rank() == 0) g.send_async(t, 1);
    if (g.rank() == 1) g.all_reduce(sum);
    std::this_thread::sleep_for(Millis(900));
    if (g.rank() == 0) g.all_reduce(sum);
    if (g.rank() == 1) g.recv(t, 0);
    EXPECT_EQ(values(sum), std::vector<float>(4, 4));
    EXPECT_EQ(values(t), std::vector<float>(4, 0));
  });
}

TEST_F(CollectivesOnCards, TimesOfAsynchronousCalls) {
  if (cards() < 2) GTEST_SKIP() << "2 cards are needed";
  on_cards(2, [](ProcessGroup& g) {
    Tensor t = of(1);
    Ref<Work> work = g.all_reduce_async(t);
    work->wait();
    EXPECT_GT(work->elapsed_ms(), 0);
    EXPECT_TRUE(work->done());
    EXPECT_EQ(work->error(), nullptr);
  });
}

// Each communicator has a lane in a profile; only the profile's first event waits for the card.
TEST_F(CollectivesOnCards, AProfileHasALaneOfEachCommunicator) {
  if (cards() < 2) GTEST_SKIP() << "2 cards are needed";
  if (!test::order_of_driver()) GTEST_SKIP() << "a real card records no order";
  std::string recorded;
  on_cards(2, [&](ProcessGroup& g) {
    const Tensor t = of(1), larger = of(1, 1000);
    g.all_reduce(t);
    g.barrier();
    Profiler profiler;
    sin(t);  // the first event
    g.barrier();
    if (g.rank() == 0) test::begin_order();
    g.barrier();
    g.all_reduce(larger);
    g.all_reduce_async(t);
    if (g.rank() == 0) g.send_async(t, 1);
    if (g.rank() == 1) g.recv(t, 0);
    const Tensor y = sin(t);
    g.barrier();
    if (g.rank() == 0) recorded = test::end_order();
    g.barrier();
    const std::string lane = to_string(default_device()) + ", NCCL of world (cuda)";
    std::map<std::string, std::vector<ProfileEvent>> lanes;
    for (const ProfileEvent& e : profiler.profile()->events())
      if (e.category == "device") lanes[e.lane].push_back(e);
    EXPECT_EQ(lanes.size(), 3u);
    const std::vector<ProfileEvent>& calls = lanes[lane];
    ASSERT_EQ(calls.size(), 2u);
    EXPECT_EQ(calls[0].name, "all_reduce");
    EXPECT_EQ(calls[0].bytes, 4000);
    EXPECT_EQ(calls[1].bytes, 16);
    EXPECT_TRUE(calls[0].detail.starts_with("f32 at cards_test.cpp:")) << calls[0].detail;
    EXPECT_GT(calls[0].took_us, 0);
    EXPECT_GE(calls[1].begin_us, calls[0].begin_us + calls[0].took_us);
    const ProfileEvent& last = lanes[to_string(default_device())].back();
    EXPECT_EQ(last.name, "sin");
    EXPECT_GE(last.begin_us + last.took_us, calls[1].begin_us) << "lanes have one zero";
    const std::vector<ProfileEvent>& messages = lanes[lane + ", messages to higher ranks"];
    ASSERT_EQ(messages.size(), 1u);
    EXPECT_EQ(messages[0].name, g.rank() == 0 ? "send" : "recv");
  });
  for (int device : {0, 1})
    EXPECT_EQ(test::OrderOnCard(recorded, device).waits_between_ops(), std::vector<std::string>());
}

TEST_F(CollectivesOnCards, CallsTogetherAreOneLaunchAndOneEvent) {
  if (cards() < 2) GTEST_SKIP() << "2 cards are needed";
  on_cards(2, [&](ProcessGroup& g) {
    const Tensor a = of(1), b = of(2, 1000), c = of(3);
    g.all_reduce(c);
    Profiler profiler;
    {
      const TogetherScope together;
      g.all_reduce_async(a);
      if (g.rank() == 0) std::this_thread::sleep_for(Millis(100));  // its group is that of rank 1
      g.all_reduce_async(b);
    }
    {
      const TogetherScope together;
      g.all_reduce_async(c);
      EXPECT_EQ(values(c), std::vector<float>(4, 12)) << "whoever needs a result submits the call";
    }
    EXPECT_EQ(values(a), std::vector<float>(4, 2));
    EXPECT_EQ(values(b), std::vector<float>(1000, 4));
    std::vector<ProfileEvent> calls;
    for (const ProfileEvent& e : profiler.profile()->events())
      if (e.name == "all_reduce") calls.push_back(e);
    ASSERT_EQ(calls.size(), 2u);
    EXPECT_TRUE(calls[0].detail.ends_with(", one of 2 calls together")) << calls[0].detail;
    EXPECT_EQ(calls[0].bytes, 4016);
  });
}

// Calls that a scope puts off hold back no message that a peer waits for.
TEST_F(CollectivesOnCards, MessagesWithinAScopeAreSubmittedInTime) {
  if (cards() < 2) GTEST_SKIP() << "2 cards are needed";
  on_cards(2, [&](ProcessGroup& g) {
    const Tensor sum = of(1), message = of(2 + g.rank());
    g.all_reduce(of(1));
    std::optional<TogetherScope> together(std::in_place);
    g.all_reduce_async(sum);
    const Ref<Work> work = g.rank() == 0 ? g.recv_async(message, 1) : g.send_async(message, 0);
    // done() asks without submitting the call, as hurry() and waits do.
    const auto until = Clock::now() + Millis(5000);
    while (!work->done() && Clock::now() < until) std::this_thread::sleep_for(Millis(1));
    EXPECT_TRUE(work->done());
    together.reset();
    EXPECT_EQ(values(sum), std::vector<float>(4, 2));
    EXPECT_EQ(values(message), std::vector<float>(4, 3));
  });
}

TEST_F(CollectivesOnCards, RanksThatShareACardPassThroughTheHost) {
  testing::internal::CaptureStderr();
  run_ranks(2, [&](ProcessGroup& g) {
    const DeviceScope scope(card(0));
    test::check_verbs(g, kF32, 9);
    test::check_verbs(g, kBF16, 9);
    EXPECT_EQ(g.backend(default_device()), "loopback");
  });
  const std::string said = testing::internal::GetCapturedStderr();
  const size_t at = said.find("ranks 0 and 1 share card GPU-");
  EXPECT_NE(at, std::string::npos) << said;
  EXPECT_EQ(said.find("share card", at + 20), std::string::npos) << said;
}

TEST_F(CollectivesOnCards, DeterministicReductionsHaveTheBitsOfTheCpu) {
  if (cards() < 4) GTEST_SKIP() << "4 cards are needed";
  on_cards(4, [](ProcessGroup& g) {
    g.all_reduce(of(1));
    auto terms = [&](Device d) {
      Tensor host = empty({3}, kF32, kCPU);
      for (int i = 0; i < 3; ++i) host.data<float>()[i] = std::sin(float(7 * g.rank() + i)) / 3;
      return transferred(host, d);
    };
    const DeterministicScope deterministic(true);
    Tensor here = terms(kCPU), there = terms(default_device());
    g.all_reduce(here);
    g.all_reduce(there);
    EXPECT_EQ(values(there), values(here));
  });
}

TEST_F(CollectivesOnCards, AnotherCardThanTheFirstIsRefused) {
  if (cards() < 4) GTEST_SKIP() << "4 cards are needed";
  run_ranks(2, [&](ProcessGroup& g) {
    {
      const DeviceScope scope(card(g.rank()));
      g.all_reduce(of(1));
    }
    const DeviceScope scope(card(g.rank() + 2));
    const std::string error = error_of([&] { g.all_reduce(of(1)); });
    EXPECT_NE(error.find("a rank uses one card, that of the group's first call"), std::string::npos)
        << error;
  });
}

// ---- memory of NCCL's own ----

TEST_F(CollectivesOnCards, MemoryOfTheGroupIsReducedInPlaceAndCounted) {
  if (cards() < 2) GTEST_SKIP() << "2 cards are needed";
  Tensor outlives;
  on_cards(2, [&](ProcessGroup& g) {
    const Device device = default_device();
    EXPECT_FALSE(g.has_own_memory(device)) << "nothing is decided";
    g.all_reduce(of(1));
    ASSERT_TRUE(g.has_own_memory(device));
    EXPECT_FALSE(g.has_own_memory(card(1 - g.rank())));
    const int64_t before = memory_stats(device).live_bytes;
    for (int i = 0; i < 3; ++i) {
      Tensor t(Meta::contiguous({1000}, kF32, device), g.allocate(4000, device));
      EXPECT_EQ(memory_stats(device).live_bytes, before + 4096);
      copy_values(t, of(g.rank(), 1000));
      g.all_reduce_async(t);
      EXPECT_EQ(values(t), std::vector<float>(1000, 1));
      if (i == 2 && g.rank() == 0) outlives = t;
    }
    EXPECT_EQ(memory_stats(device).live_bytes, before + (g.rank() == 0 ? 4096 : 0));
    g.barrier();
  });
  EXPECT_EQ(values(outlives), std::vector<float>(1000, 1));
}

TEST_F(CollectivesOnCards, RanksThatAllocateUnequallyAreTold) {
  if (cards() < 2) GTEST_SKIP() << "2 cards are needed";
  std::string error;
  EXPECT_THROW(on_cards(2,
                        [&](ProcessGroup& g) {
                          g.all_reduce(of(1));
                          const size_t bytes = g.rank() ? 4096 : 8192;
                          const std::string mine =
                              error_of([&] { g.allocate(bytes, default_device()); });
                          if (g.rank() == 0) error = mine;
                          throw UserError(mine);
                        }),
               Error);
  EXPECT_TRUE(error.starts_with("allocate on world (cuda): rank ")) << error;
  EXPECT_NE(error.find("NCCL: ncclCommWindowRegister: invalid usage"), std::string::npos) << error;
}

TEST_F(CollectivesOnCards, ARankThatDoesNotAllocateIsNamedAtTheDeadline) {
  if (cards() < 2) GTEST_SKIP() << "2 cards are needed";
  std::string error;
  EXPECT_THROW(on_cards(2,
                        [&](ProcessGroup& g) {
                          g.all_reduce(of(1));
                          if (g.rank() == 1) return void(std::this_thread::sleep_for(Millis(2000)));
                          error = error_of([&] { g.allocate(4096, default_device()); });
                          throw UserError(error);
                        },
                        {.timeout = Millis(700)}),
               Error);
  EXPECT_NE(error.find("rank 1 not seen for"), std::string::npos) << error;
}

// ---- failures ----

TEST_F(CollectivesOnCards, ARankThatDoesNotComeIsNamedAtTheDeadline) {
  if (cards() < 2) GTEST_SKIP() << "2 cards are needed";
  std::string error;
  const auto start = Clock::now();
  EXPECT_THROW(on_cards(2,
                        [&](ProcessGroup& g) {
                          Tensor t = of(1);
                          g.all_reduce(t);
                          EXPECT_EQ(values(t)[0], 2);
                          if (g.rank() == 1) {
                            std::this_thread::sleep_for(std::chrono::milliseconds(2500));
                            return;
                          }
                          g.all_reduce(t);
                          error = error_of([&] { values(t); });
                          throw UserError(error);
                        },
                        {.timeout = Millis(1000)}),
               Error);
  EXPECT_NE(error.find("all_reduce #2 on world (cuda) (cards_test.cpp:"), std::string::npos)
      << error;
  EXPECT_NE(error.find("rank 1 not seen for 1"), std::string::npos) << error;
  EXPECT_LT(std::chrono::duration<double>(Clock::now() - start).count(), 10);
}

TEST_F(CollectivesOnCards, TheHostHearsOfAFailureThroughWhateverItWaitsFor) {
  if (cards() < 2) GTEST_SKIP() << "2 cards are needed";
  std::string through_kernel, through_group;
  EXPECT_THROW(on_cards(2,
                        [&](ProcessGroup& g) {
                          Tensor t = of(1);
                          g.all_reduce(t);
                          EXPECT_EQ(values(t)[0], 2);
                          if (g.rank() == 1) return void(std::this_thread::sleep_for(Millis(2500)));
                          g.all_reduce(t);
                          Tensor later = t * 2.0 + 1.0;
                          through_kernel = error_of([&] { values(later); });
                          EXPECT_EQ(error_of([&] { values(of(3)); }), "no error");
                          through_group = error_of([&] { g.all_reduce(of(1)); });
                          throw UserError(through_group);
                        },
                        {.timeout = Millis(1000)}),
               Error);
  EXPECT_NE(through_kernel.find("rank 1 not seen for 1"), std::string::npos) << through_kernel;
  EXPECT_EQ(through_group, through_kernel);
}

TEST_F(CollectivesOnCards, ARankThatThrowsEndsTheOthersCalls) {
  if (cards() < 2) GTEST_SKIP() << "2 cards are needed";
  std::string error;
  const auto start = Clock::now();
  EXPECT_THROW(on_cards(2,
                        [&](ProcessGroup& g) {
                          Tensor t = of(1);
                          g.all_reduce(t);
                          EXPECT_EQ(values(t)[0], 2);
                          if (g.rank() == 1) throw UserError("no more data");
                          g.all_reduce(t);
                          error = error_of([&] { values(t); });
                          throw UserError(error);
                        }),
               Error);
  EXPECT_NE(error.find("rank 1 aborted the group: no more data"), std::string::npos) << error;
  EXPECT_LT(std::chrono::duration<double>(Clock::now() - start).count(), 10);
}

/// What rank 0 hears when rank 1 makes another call.
std::string of_mismatch(CollectivesOnCards*, CollKind kind, int variant, Device first) {
  std::string error;
  try {
    run_ranks(2, [&](ProcessGroup& g) {
      const DeviceScope scope({first.kind, int8_t(g.rank())});
      g.all_reduce(of(1));
      test::call_variant(g, kind, variant, 1);
      if (g.rank() == 0) error = error_of([&] { g.flush(); });
      g.flush();
    });
  } catch (const Error&) {
  }
  return error;
}

TEST_F(CollectivesOnCards, CallsThatDifferAreNamed) {
  if (cards() < 2) GTEST_SKIP() << "2 cards are needed";
  const auto start = Clock::now();
  const char* differ[] = {"", "kind", "operator", "dtype", "count", "root"};
  for (auto [kind, variant] : {std::pair{CollKind::kAllReduce, 2},
                               {CollKind::kAllReduce, 3},
                               {CollKind::kAllGather, 4},
                               {CollKind::kBroadcast, 5},
                               {CollKind::kReduceScatter, 4}}) {
    const std::string error = of_mismatch(this, kind, variant, card(0));
    const size_t site = error.find("verbs.cpp:");
    EXPECT_NE(site, std::string::npos) << error;
    EXPECT_NE(error.find("verbs.cpp:", site + 1), std::string::npos) << error;
    EXPECT_NE(error.find(differ[variant]), std::string::npos) << error;
  }
  EXPECT_LT(std::chrono::duration<double>(Clock::now() - start).count(), 30);
}

// ---- ranks as processes ----

TEST_F(CollectivesOnCards, ProcessesMoveEveryVerb) {
  if (cards() < 2) GTEST_SKIP() << "2 cards are needed";
  RankProcesses ranks(2, "verbs_on_cards", {});
  for (const RankResult& r : ranks.wait_all(test::kHangs)) {
    EXPECT_EQ(r.status, 0) << r.output;
    EXPECT_NE(r.output.find("backend nccl\n"), std::string::npos) << r.output;
  }
}

void expect_said_once(const std::string& output, const std::string& text) {
  const size_t said = output.find(text);
  ASSERT_NE(said, std::string::npos) << output;
  EXPECT_EQ(output.find(text, said + 1), std::string::npos) << output;
}

TEST_F(CollectivesOnCards, MemoryThatOneRankCannotRegisterIsOrdinaryOnAll) {
  if (cards() < 2) GTEST_SKIP() << "2 cards are needed";
  const char* no_windows = "refuse:ncclCommWindowRegister:0";
  const auto run = [](const std::string& refused) {
    return RankProcesses(1, "memory_on_two_cards", {{"VGPU_NCCL", refused}}).wait(0, test::kHangs);
  };
  const RankResult buffers = run(no_windows);
  EXPECT_EQ(buffers.status, 0) << buffers.output;
  EXPECT_NE(buffers.output.find("true true\n"), std::string::npos) << buffers.output;
  expect_said_once(buffers.output, "NCCL refuses windows of memory on cuda:0");
  const RankResult none = run(std::string(no_windows) + ",refuse:ncclCommRegister:1");
  EXPECT_EQ(none.status, 0) << none.output;
  EXPECT_NE(none.output.find("true false\n"), std::string::npos) << none.output;
  expect_said_once(none.output, "NCCL has no memory on cuda:0 here or on another rank");
}

// It is asked for twice, since the card's allocator may keep some.
TEST_F(CollectivesOnCards, MemoryThatOneRankDoesNotHaveIsOrdinaryOnAll) {
  if (cards() < 2) GTEST_SKIP() << "2 cards are needed";
  const auto run = [](const std::string& refused) {
    return RankProcesses(1, "memory_on_two_cards",
                         {{"VGPU_NCCL", refused}, {"TESSERA_TIMEOUT", "5"}})
        .wait(0, test::kHangs);
  };
  const RankResult once = run("refuse:ncclMemAlloc:1");
  EXPECT_EQ(once.status, 0) << once.output;
  EXPECT_NE(once.output.find("true true\n"), std::string::npos) << once.output;
  const RankResult twice = run("refuse:ncclMemAlloc:1,refuse:ncclMemAlloc:2");
  EXPECT_EQ(twice.status, 0) << twice.output;
  EXPECT_NE(twice.output.find("true false\n"), std::string::npos) << twice.output;
  expect_said_once(twice.output, "NCCL has no memory on cuda:0 here or on another rank");
}

TEST_F(CollectivesOnCards, AKilledRankIsNamedByTheSurvivors) {
  if (cards() < 4) GTEST_SKIP() << "4 cards are needed";
  // NCCL of rank 0 notices it, before it is announced.
  RankProcesses ranks(4, "loop_on_cards", {{"TEST_KILLED", "2"}, {"VGPU_NCCL", "error:0:16"}});
  EXPECT_NE(ranks.wait(2, test::kHangs).status, 0);
  std::this_thread::sleep_for(Millis(100));
  announce_death(*ranks.store(), 2, "signal 9 (Killed)");  // as tlaunch does
  const auto start = Clock::now();
  for (const int r : {0, 1, 3}) {
    const RankResult result = ranks.wait(r, test::kHangs);
    EXPECT_EQ(result.status, 0) << result.output;
    EXPECT_NE(result.output.find("rank 2 is gone, signal 9 (Killed)"), std::string::npos)
        << result.output;
  }
  EXPECT_LT(std::chrono::duration<double>(Clock::now() - start).count(), 30);
}

}  // namespace
}  // namespace tessera
