// tlaunch and its ranks through the store: survivors learn at once which rank died and how. The
// worker is this very program, which tlaunch runs with the disabled test below.
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <thread>

#include "collectives/process_group.h"
#include "collectives/store/environment.h"
#include "collectives/store/liveness.h"
#include "tests/launcher/command.h"

namespace tessera::testing {
namespace {

using namespace std::chrono_literals;

Result run_as_workers(std::vector<std::string> flags, const std::string& worker = "Worker") {
  std::string self = std::filesystem::read_symlink("/proc/self/exe").string();
  flags.insert(flags.end(), {self, "--gtest_also_run_disabled_tests", "--gtest_brief=1",
                             "--gtest_filter=Announce.DISABLED_" + worker});
  return tlaunch(flags);
}

// Rank 2 leaves, rank 1 is killed in the first attempt, rank 0 tells what it sees.
TEST(Announce, DISABLED_Worker) {
  JobEnvironment job = job_environment();
  auto store = connect_store(job);
  store->set("here/" + std::to_string(job.rank), "");
  if (job.restart_count == 1) {
    std::vector<std::string> all = {"here/0", "here/1", "here/2"};
    store->wait(all, 10s);
    EXPECT_TRUE(dead_ranks(*store, job.world_size).empty()) << "news of an earlier attempt";
    return;
  }
  if (job.rank == 2) return;
  EXPECT_EQ(store->get(left_key(2), 10s), "exit status 0");
  if (job.rank == 1) ::kill(::getpid(), SIGKILL);
  EXPECT_EQ(store->get(kFailedKey, 10s), "1");
  for (const DeadRank& dead : dead_ranks(*store, job.world_size))
    fmt::print("rank {} died: {}\n", dead.rank, dead.how);
  std::fflush(stdout);
  ::_exit(5);
}

TEST(Announce, SurvivorsLearnWhoDied) {
  Result r = run_as_workers({"--nproc", "3"});
  EXPECT_EQ(r.exit_code, 128 + SIGKILL);
  EXPECT_NE(r.out.find("[rank0] rank 1 died: signal 9 (Killed)\n"), std::string::npos) << r.out;
  EXPECT_NE(r.err.find("rank 1 failed first: signal 9"), std::string::npos) << r.err;
  EXPECT_NE(r.err.find("rank 0 failed later: exit status 5"), std::string::npos) << r.err;
  EXPECT_NE(r.err.find("rank 2 finished"), std::string::npos) << r.err;
  EXPECT_LT(r.seconds, 30) << "nobody had to wait for a deadline";
}

// Rank 1 aborts the group and takes its time to end; rank 0, which fails because of that, ends at
// once.
TEST(Announce, DISABLED_Aborting) {
  Ref<ProcessGroup> group = init_process_group();
  try {
    group->barrier();  // both have joined
    if (group->rank() == 1) {
      group->abort("the disk is full");
      std::this_thread::sleep_for(500ms);
      ::_exit(3);
    }
    group->barrier();
  } catch (const CommError&) {
    ::_exit(4);
  }
}

TEST(Announce, WhoIsTheCauseFailedFirstWhoeverEndsFirst) {
  std::vector<std::string> backends = {"shm"};
#if !defined(__SANITIZE_THREAD__)  // for which Gloo is not built
  backends.push_back("gloo");
#endif
  for (const std::string& backend : backends) {
    Result r = run_as_workers({"--nproc", "2", "--env", "TESSERA_BACKEND=" + backend}, "Aborting");
    EXPECT_EQ(r.exit_code, 3) << backend;
    EXPECT_NE(r.err.find("rank 1 failed first: exit status 3"), std::string::npos) << r.err;
    EXPECT_NE(r.err.find("rank 0 failed later: exit status 4"), std::string::npos) << r.err;
  }
}

// Rank 1 does not join. A program of ranks, as the other disabled ones: the test below starts it.
TEST(Announce, DISABLED_Late) {
  if (job_environment().rank == 1) std::this_thread::sleep_for(600s);
  try {
    init_process_group();
  } catch (const CommError& e) {
    fmt::print("{}\n", e.what());
    std::fflush(stdout);
    ::_exit(4);
  }
}

TEST(Announce, ARankThatDoesNotJoinIsWaitedForAsLongAsAsked) {
  Result r = run_as_workers({"--nproc", "2", "--join-timeout", "1", "--grace", "1"}, "Late");
  EXPECT_EQ(r.exit_code, 4) << r.err;
  EXPECT_NE(r.out.find("rank 1 of 2 did not join world within 1 s"), std::string::npos) << r.out;
  EXPECT_GE(r.seconds, 1);
  EXPECT_LT(r.seconds, 30);
}

// Rank 1 stops by itself; the others wait until the deadline.
TEST(Announce, DISABLED_Stopping) {
  Ref<ProcessGroup> group = init_process_group();
  try {
    for (int i = 0;; ++i) {
      if (group->rank() == 1 && i == 5) ::raise(SIGSTOP);
      group->barrier();
    }
  } catch (const CommError& e) {
    group->abort(e.what());
    ::_exit(4);
  }
}

TEST(Announce, ARankThatASignalHasStoppedIsNamedFirst) {
  Result r = run_as_workers({"--nproc", "3", "--timeout", "1", "--grace", "1"}, "Stopping");
  EXPECT_EQ(r.exit_code, 4) << r.err;
  const size_t named = r.err.find(
                   "tlaunch: rank 1 held up the others, who gave it up: a signal had stopped it"),
               first = r.err.find(" failed first: exit status 4");
  EXPECT_NE(named, std::string::npos) << r.err;
  EXPECT_LT(named, first) << r.err;
  EXPECT_EQ(r.err.find("rank 1 failed first"), std::string::npos) << r.err;
  EXPECT_LT(r.seconds, 30);
}

TEST(Announce, ARestartBeginsWithoutOldNews) {
  Result r = run_as_workers({"--nproc", "3", "--max-restarts", "1"});
  EXPECT_EQ(r.exit_code, 0) << r.out << r.err;
}

}  // namespace
}  // namespace tessera::testing
