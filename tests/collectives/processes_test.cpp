// Ranks as processes, over shared memory and over Gloo: results, deaths, stops, leaks.
#include "tests/collectives/processes.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <chrono>
#include <map>
#include <memory>
#include <random>
#include <thread>

#include "collectives/store/liveness.h"
#include "tests/collectives/verbs.h"
#include "tests/support/printed.h"

namespace tessera {
namespace {

using test::RankProcesses;
using test::RankResult;

class Processes : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (GetParam() != "shm" && !test::kHaveGloo) GTEST_SKIP() << "Gloo is left out of this build";
  }
  /// Starts four ranks on two hosts where the backend is one for several hosts, else `n` ranks on
  /// one.
  RankProcesses start(int n, const std::string& program,
                      std::map<std::string, std::string> more = {}) {
    const bool several = GetParam() == "gloo+shm";
    more["TESSERA_BACKEND"] = several ? "" : GetParam();
    if (several) more["TEST_COUNT"] = "50000";  // larger than what goes straight to every rank
    size_ = several ? 4 : n;
    return RankProcesses(size_, program, more, several ? 2 : 1);
  }
  std::unique_ptr<RankProcesses> start_awaited(int n, const std::string& program,
                                               std::map<std::string, std::string> more) {
    more["TEST_AWAITED"] = "1";
    return std::unique_ptr<RankProcesses>(new RankProcesses(start(n, program, std::move(more))));
  }
  int size_ = 0;  // ranks that were started last
};

TEST_P(Processes, EveryVerbAndDtypeIsRight) {
  const bool several = GetParam() == "gloo+shm";
  for (int n : {1, 2, 3, 4, 8})
    for (int hosts : several ? std::vector<int>{2, 4} : std::vector<int>{1}) {
      if (hosts > 1 && n < 4) continue;  // there are at least two blocks of two ranks
      if (hosts == n) continue;
      RankProcesses ranks(n, "verbs", {{"TESSERA_BACKEND", several ? "" : GetParam()}}, hosts);
      for (const RankResult& r : ranks.wait_all(test::kHangs)) {
        EXPECT_EQ(r.status, 0) << r.output;
        EXPECT_NE(r.output.find("backend " + (n == 1 ? "solo" : GetParam()) + "\n"),
                  std::string::npos)
            << r.output;
      }
    }
}

TEST_P(Processes, CallsThatDifferInAnyWayAreAnErrorOnEveryRank) {
  RankProcesses ranks = start(3, "mismatches");
  for (const RankResult& r : ranks.wait_all(test::kHangs)) {
    EXPECT_EQ(r.status, 0) << r.output;
    EXPECT_NE(r.output.find("38 mismatches"), std::string::npos) << r.output;
  }
}

double seconds_in(const std::string& output) { return number_after("after ", output); }
// An end is noticed before the deadline of 60 s; after a stop, no second deadline is waited for.
constexpr double kSoon = 30;

TEST_P(Processes, AKilledRankIsNamedByAllSurvivors) {
  RankProcesses ranks = start(3, "loop", {{"TESSERA_FAULT", "rank=1,op=all_reduce,n=20,kill"}});
  for (int r = 0; r < size_; ++r) {
    if (r == 1) continue;
    RankResult result = ranks.wait(r, 60);
    EXPECT_EQ(result.status, 0) << result.output;
    EXPECT_NE(result.output.find("all_reduce #20 on world (rank_programs.cpp:"), std::string::npos)
        << result.output;
    EXPECT_NE(result.output.find("rank 1 is gone"), std::string::npos) << result.output;
    EXPECT_NE(result.output.find("blamed: 1\n"), std::string::npos) << result.output;
    EXPECT_LT(seconds_in(result.output), kSoon);
  }
  EXPECT_EQ(WTERMSIG(ranks.wait(1, 1).status), SIGKILL);
}

// The other ranks may be in small calls or large ones, in messages, or in several at once.
TEST_P(Processes, ARankKilledAtAnyMomentIsNamed) {
  const char* text = std::getenv("TEST_KILLS");
  const int kills = text ? std::atoi(text) : 12;
  std::mt19937_64 random{uint64_t(kills)};
  for (int i = 0; i < kills; ++i) {
    const int n = GetParam() == "gloo+shm" ? 4 : int(2 + random() % 3),
              victim = int(random() % uint64_t(n));
    std::map<std::string, std::string> how{
        {"TEST_SEED", std::to_string(random() % 1000)},
        {"TEST_VICTIM", std::to_string(victim)},
        {"TEST_MICROSECONDS", std::to_string(random() % 50'000)}};
    RankProcesses ranks = start(n, "storm", how);
    for (int r = 0; r < n; ++r) {
      RankResult result = ranks.wait(r, 60);
      std::string round = fmt::format("round {}, rank {} of {}", i, r, n);
      if (r == victim) {
        EXPECT_EQ(WTERMSIG(result.status), SIGKILL) << round << "\n" << result.output;
        continue;
      }
      EXPECT_EQ(result.status, 0) << round << "\n" << result.output;
      EXPECT_NE(result.output.find(fmt::format("rank {} is gone", victim)), std::string::npos)
          << round << "\n"
          << result.output;
      EXPECT_NE(result.output.find(fmt::format("blamed: {}\n", victim)), std::string::npos)
          << round << "\n"
          << result.output;
    }
  }
}

TEST_P(Processes, AStoppedRankIsNamedAtTheDeadline) {
  RankProcesses ranks = start(
      3, "loop", {{"TESSERA_FAULT", "rank=2,op=all_reduce,n=20,stop"}, {"TESSERA_TIMEOUT", "1.5"}});
  for (int r = 0; r < size_; ++r) {
    if (r == 2) continue;
    RankResult result = ranks.wait(r, 60);
    double unseen = number_after("rank 2 not seen for ", result.output);
    EXPECT_GE(unseen, 1.5) << result.output;
    EXPECT_NE(result.output.find("it last finished #19"), std::string::npos) << result.output;
    EXPECT_NE(result.output.find(size_ == 3 ? "ranks 0, 1 are waiting" : "ranks 0, 1, 3 are wait"),
              std::string::npos)
        << result.output;
    EXPECT_NE(result.output.find("blamed: 2\n"), std::string::npos) << result.output;
    EXPECT_LT(seconds_in(result.output), kSoon);
  }
}

// Faults while ranks run `program`, one in each round. The next round begins when the fault of the
// one before has happened; its ranks then mostly wait for their deadline.
struct Round {
  std::unique_ptr<RankProcesses> ranks;
  int victim;
  bool stops;
};

// Waits until the ranks run, and then for up to `micros`.
void await_start(RankProcesses& ranks, uint64_t micros) {
  const std::string started = "test/started";
  ranks.store()->wait({&started, 1}, std::chrono::minutes(1));
  std::this_thread::sleep_for(std::chrono::microseconds(micros));
}

// A rank may stop anywhere in a call: the others wait for it, or for a rank that waits for it.
TEST_P(Processes, ARankStoppedAtAnyMomentIsNamed) {
  std::mt19937_64 random(3);
  std::vector<Round> rounds;
  for (int i = 0; i < 3; ++i) {
    auto ranks = start_awaited(4, "loop", {{"TEST_COUNT", "3000000"}, {"TESSERA_TIMEOUT", "1"}});
    const int victim = int(random() % 4);
    await_start(*ranks, random() % 100'000);
    kill(ranks->pid(victim), SIGSTOP);
    rounds.push_back({std::move(ranks), victim, true});
  }
  for (const auto& [ranks, victim, stops] : rounds)
    for (int r = 0; r < 4; ++r) {
      if (r == victim) continue;
      RankResult result = ranks->wait(r, 60);
      EXPECT_NE(result.output.find(fmt::format("blamed: {}\n", victim)), std::string::npos)
          << victim << " stopped, but rank " << r << " says\n"
          << result.output;
    }
}

// Every question that a rank then asks the store goes unanswered.
TEST_P(Processes, WithoutAStoreTheDeadlineStillEndsAWait) {
  auto ranks = start_awaited(3, "loop", {{"TESSERA_TIMEOUT", "1"}});
  await_start(*ranks, 50'000);
  ranks->lose_store();
  kill(ranks->pid(1), SIGSTOP);
  // The first to give up ends, which may end the other's wait before its own deadline does.
  int by_deadline = 0;
  for (int r : {0, 2}) {
    const RankResult result = ranks->wait(r, 60);
    const bool late = result.output.find(" not seen for") != std::string::npos,
               by_end =
                   result.output.find(fmt::format("rank {} is gone", 2 - r)) != std::string::npos;
    EXPECT_TRUE(late || by_end) << result.output;
    EXPECT_LT(seconds_in(result.output), 5) << result.output;
    by_deadline += late;
  }
  EXPECT_GE(by_deadline, 1);
}

// In groups that overlap, ranks wait for others that wait for the one that has ended or stopped.
// Each rank finds that one, and so does the store, where launchers look.
TEST_P(Processes, AFaultInOverlappingGroupsIsBlamedOnItsRank) {
  const char* text = std::getenv("TEST_KILLS");
  std::mt19937_64 random(7);
  std::vector<Round> rounds;
  for (int i = 0; i < (text ? std::atoi(text) : 6); ++i) {
    const bool stops = i % 2;
    auto ranks = start_awaited(
        4, "mesh",
        {{"TEST_SEED", std::to_string(random() % 1000)}, {"TESSERA_TIMEOUT", stops ? "1" : "60"}});
    const int victim = int(random() % 4);
    await_start(*ranks, random() % 100'000);
    kill(ranks->pid(victim), stops ? SIGSTOP : SIGKILL);
    rounds.push_back({std::move(ranks), victim, stops});
  }
  for (size_t i = 0; i < rounds.size(); ++i) {
    const auto& [ranks, victim, stops] = rounds[i];
    for (int r = 0; r < 4; ++r) {
      if (r == victim) continue;
      RankResult result = ranks->wait(r, 60);
      EXPECT_NE(result.output.find(fmt::format("culprits: {}\n", victim)), std::string::npos)
          << "round " << i << ": " << victim << (stops ? " stopped" : " was killed")
          << ", but rank " << r << " says\n"
          << result.output;
      EXPECT_LT(seconds_in(result.output), kSoon) << result.output;
    }
    EXPECT_EQ(cause_of_failure(*ranks->store()), std::vector<int>{victim}) << "round " << i;
  }
}

// Rank 0 is busy for longer than the deadline, which makes rank 1 wait, and then stops.
TEST(Waiting, ARankThatStopsAtItsWorkIsNotWaitedForForEver) {
  RankProcesses ranks(2, "work", {{"TESSERA_TIMEOUT", "1"}});
  const RankResult result = ranks.wait(1, 60);
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_NE(result.output.find("world rank 0 has stopped"), std::string::npos) << result.output;
  const double waited = number_after("after ", result.output);
  EXPECT_GE(waited, 2.5) << result.output;  // as long as rank 0 was busy
  EXPECT_LT(waited, kSoon) << result.output;
}

TEST_P(Processes, ARankThatExitsIsNamed) {
  RankProcesses ranks = start(2, "loop", {{"TESSERA_FAULT", "rank=0,n=5,exit"}});
  RankResult result = ranks.wait(1, 60);
  EXPECT_EQ(result.status, 0) << result.output;
  EXPECT_NE(result.output.find("rank 0 is gone"), std::string::npos) << result.output;
  EXPECT_LT(seconds_in(result.output), kSoon);
}

// The address sanitizer keeps 256 MiB of freed memory, and its own tables of threads and stacks
// grow for longer than a third of 30 cycles.
#if defined(__SANITIZE_ADDRESS__)
constexpr const char *kMoreOptions = ":quarantine_size_mb=1", *kGlooCycles = "120";
#else
constexpr const char *kMoreOptions = "", *kGlooCycles = "30";
#endif

TEST_P(Processes, GroupsLeaveNothingBehind) {
  const char* options = std::getenv("ASAN_OPTIONS");
  RankProcesses ranks =
      start(2, "cycle",
            {{"TEST_CYCLES", GetParam() == "shm" ? "200" : kGlooCycles},
             {"ASAN_OPTIONS", (options ? options : "") + std::string(kMoreOptions)}});
  for (const RankResult& r : ranks.wait_all(test::kHangs)) EXPECT_EQ(r.status, 0) << r.output;
}

TEST_P(Processes, SumsHaveEqualBitsWhereverTensorsLie) {
  for (int size : {2, 3}) {
    RankProcesses ranks = start(size, "ways");
    for (const RankResult& r : ranks.wait_all(test::kHangs)) EXPECT_EQ(r.status, 0) << r.output;
  }
}

TEST_P(Processes, AForkedChildIsToldSo) {
  RankProcesses ranks = start(2, "forked");
  for (const RankResult& r : ranks.wait_all(test::kHangs)) EXPECT_EQ(r.status, 0) << r.output;
}

INSTANTIATE_TEST_SUITE_P(Backends, Processes, testing::Values("shm", "gloo", "gloo+shm"),
                         [](const auto& p) { return p.index < 2 ? p.param : "several_hosts"; });

#if !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)  // which need addresses themselves
TEST(Pool, ARankWithoutAddressesIsNamedAndServed) {
  RankProcesses early(2, "cramped", {});
  RankResult rank0 = early.wait(0, 60), rank1 = early.wait(1, 60);
  EXPECT_EQ(rank0.status, 0) << rank0.output;
  EXPECT_EQ(rank1.status, 0) << rank1.output;
  EXPECT_NE(rank1.output.find("shm: no addresses for "), std::string::npos) << rank1.output;

  RankProcesses late(2, "cramped", {{"TEST_LATE", "1"}});
  rank0 = late.wait(0, 60), rank1 = late.wait(1, 60);
  EXPECT_EQ(rank0.status, 0) << rank0.output;
  EXPECT_EQ(rank1.status, 0) << rank1.output;
  EXPECT_NE(rank1.output.find("memory of rank 0 is out of reach, no addresses for "),
            std::string::npos)
      << rank1.output;
}
#endif

TEST(Backend, SharedMemoryIsChosenOnOneHost) {
  RankProcesses ranks(2, "verbs", {});
  for (const RankResult& r : ranks.wait_all(test::kHangs))
    EXPECT_NE(r.output.find("backend shm"), std::string::npos) << r.output;
}

}  // namespace
}  // namespace tessera
