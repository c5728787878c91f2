// Ranks on cards as processes: every verb on many ranks, and what happens to one of four ranks at a
// random moment of a random program: every other rank learns of it in time, names the rank, and
// ends. On the virtual GPU this is ctest vgpu_processes; scripts/soak runs more seeds.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <filesystem>
#include <random>

#include "collectives/store/liveness.h"
#include "tests/collectives/processes.h"
#include "tests/support/fuzz.h"
#include "tests/support/on_card.h"

namespace tessera {
namespace {

using test::RankProcesses;
using test::RankResult;

constexpr int kRanks = 4;
constexpr double kDeadline = 2;  // seconds, of a call

class ProcessesOnCards : public test::OnCard {};

TEST_F(ProcessesOnCards, ManyMoveEveryVerb) {
  for (int n : {4, 8}) {
    if (cards() < n) GTEST_SKIP() << n << " cards are needed";
    RankProcesses ranks(n, "verbs_on_cards", {});
    for (const RankResult& r : ranks.wait_all(test::kHangs)) {
      EXPECT_EQ(r.status, 0) << r.output;
      EXPECT_NE(r.output.find("backend nccl\n"), std::string::npos) << r.output;
    }
  }
}

/// What happens to the rank, and what every other rank says, where {} is the rank.
struct Event {
  const char* what;
  bool ends;  // the rank: the launcher announces how, and nobody waits for a deadline
  std::vector<const char*> says;
  // What a rank says instead that waits in another call, or another group, than the one with the
  // fault. Empty: there is no other.
  std::vector<const char*> elsewhere = {};
};
const Event kEvents[] = {
    {"kill", true, {"rank {} is gone, ", "signal 9 (Killed)"}},
    {"stop", false, {"rank {} not seen for "}},
    {"exit", true, {"rank {} is gone, ", "exit status 3"}},
    // The other call may be one of the group of the CPU, where it is the only one that waits.
    {"another call",
     false,
     {"rank {} called ", "ranks made different calls"},
     {"rank {} not seen for "}},
    // Nothing says which card it is. Ranks whose part of the call is done are not held up by it,
    // and miss the rank in a later one.
    {"hang of its card", false, {"not all of its data has come"}, {"rank {} not seen for "}},
    {"error of its NCCL", false, {"rank {}", "remote process exited or there was a network error"}},
};

bool says(const std::string& error, const std::vector<const char*>& parts, int victim) {
  return !parts.empty() && std::ranges::all_of(parts, [&](const char* part) {
    return error.find(fmt::format(fmt::runtime(part), victim)) != std::string::npos;
  });
}

std::map<std::string, std::string> environment_of(const Event& event, int victim, int64_t nth) {
  const std::string what = event.what, fault = fmt::format("rank={},n={},", victim, nth);
  if (what == "another call")
    return {{"TEST_ODD", std::to_string(victim)}, {"TEST_ODD_CALL", std::to_string(nth)}};
  if (what == "hang of its card") return {{"VGPU_NCCL", fmt::format("hang:{}:{}", victim, nth)}};
  if (what == "error of its NCCL") return {{"VGPU_NCCL", fmt::format("error:{}:{}", victim, nth)}};
  return {{"TESSERA_FAULT", fault + what}};
}

int64_t left_in_shared_memory() {
  int64_t n = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm"))
    n += entry.path().filename().string().find("tessera") != std::string::npos ||
         entry.path().filename().string().find("vgpu") != std::string::npos;
  return n;
}

TEST_F(ProcessesOnCards, WhateverHappensToARankIsNamedByAllOthers) {
  if (cards() < kRanks) GTEST_SKIP() << kRanks << " cards are needed";
  const int64_t left_before = left_in_shared_memory();
  const test::FuzzSeeds seeds = test::fuzz_seeds(std::size(kEvents));
  for (uint64_t seed = seeds.first; seed < seeds.end(); ++seed) {
    const Event& event = kEvents[seed % std::size(kEvents)];
    std::mt19937_64 random(seed);
    const int victim = int(random() % kRanks);
    const int64_t nth = 1 + int64_t(random() % 60);
    SCOPED_TRACE(test::run_again(seed) +
                 fmt::format("{} of rank {} at call {}", event.what, victim, nth));
    std::map<std::string, std::string> environment = environment_of(event, victim, nth);
    environment["TEST_SEED"] = std::to_string(seed);
    environment["TESSERA_TIMEOUT"] = std::to_string(int(kDeadline));
    RankProcesses ranks(kRanks, "storm_on_cards", environment);
    if (event.ends) {
      const int status = ranks.wait(victim, test::kHangs).status;
      announce_death(*ranks.store(), victim,
                     WIFSIGNALED(status) ? "signal 9 (Killed)"
                                         : fmt::format("exit status {}", WEXITSTATUS(status)));
    }
    double latest = 0;
    for (int r = 0; r < kRanks; ++r) {
      if (r == victim && (event.ends || std::string(event.what) == "stop")) continue;
      const RankResult result = ranks.wait(r, test::kHangs);
      EXPECT_EQ(result.status, 0) << "rank " << r << ": " << result.output;
      const size_t at = result.output.find("after ");
      ASSERT_NE(at, std::string::npos) << "rank " << r << ": " << result.output;
      const std::string error = result.output.substr(at);
      latest = std::max(latest, std::atof(error.c_str() + 6));
      EXPECT_TRUE(says(error, event.says, victim) || says(error, event.elsewhere, victim))
          << "rank " << r << ": " << error;
    }
    EXPECT_LT(latest, event.ends ? 2 : kDeadline + 2);
  }
  EXPECT_EQ(left_in_shared_memory(), left_before);
}

}  // namespace
}  // namespace tessera
