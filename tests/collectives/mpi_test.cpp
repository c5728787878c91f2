// Ranks that mpirun starts: this test binary (rank_programs.cpp), and train.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

struct Outcome {
  int status = 0;  // as waitpid gives it
  std::string output;
  double seconds = 0;
};

/// `command` by the shell, in an environment of `settings`, ended after a minute.
Outcome run(const std::string& settings, const std::string& command) {
  std::string line = "env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 " + settings +
                     " timeout 60 " + command + " 2>&1";
  auto start = std::chrono::steady_clock::now();
  Outcome o;
  FILE* pipe = popen(line.c_str(), "r");
  if (!pipe) return {-1, "popen failed", 0};
  char text[4096];
  while (size_t n = fread(text, 1, sizeof text, pipe)) o.output.append(text, n);
  o.status = pclose(pipe);
  o.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return o;
}

// There may be fewer cores than ranks; ranks share them instead of being bound to one.
std::string mpirun(int n) {
  return "mpirun --oversubscribe --bind-to none -n " + std::to_string(n) + " ";
}
std::string from_environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : ".";
}

class Mpirun : public testing::Test {
 protected:
  void SetUp() override {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "Open MPI is not instrumented, and keeps memory to its end";
#elif !defined(TESSERA_HAVE_MPI)
    GTEST_SKIP() << "built without Open MPI";
#endif
  }
  Outcome program(int ranks, const std::string& name, const std::string& settings) {
    return run("OMP_NUM_THREADS=1 TEST_PROGRAM=" + name + " " + settings, mpirun(ranks) + self_);
  }
  // Beside this program, however that was started.
  const std::string bin_ = std::filesystem::read_symlink("/proc/self/exe").parent_path().string();
  const std::string self_ = bin_ +
                            "/test_collectives --gtest_filter=Rank.DISABLED_Program "
                            "--gtest_also_run_disabled_tests";
};

TEST_F(Mpirun, EveryVerbIsRightOverMessages) {
  for (int ranks : {1, 2, 3, 4, 8}) {
    Outcome o = program(ranks, "verbs", "TESSERA_BACKEND=mpi");
    EXPECT_EQ(o.status, 0) << o.output;
    EXPECT_NE(o.output.find(ranks == 1 ? "backend solo" : "backend mpi"), std::string::npos)
        << o.output;
  }
}

TEST_F(Mpirun, CallsThatDifferInAnyWayAreAnErrorOnEveryRank) {
  Outcome o = program(3, "mismatches", "TESSERA_BACKEND=mpi");
  EXPECT_EQ(o.status, 0) << o.output;
  EXPECT_NE(o.output.find("32 mismatches"), std::string::npos) << o.output;
}

TEST_F(Mpirun, RanksOfOneHostShareMemory) {
  Outcome o = program(2, "verbs", "");
  EXPECT_EQ(o.status, 0) << o.output;
  EXPECT_NE(o.output.find("backend shm"), std::string::npos) << o.output;
}

TEST_F(Mpirun, AStoppedRankIsReportedAtTheDeadlineAndTheJobEnds) {
  Outcome o = program(3, "loop",
                      "TESSERA_BACKEND=mpi TESSERA_TIMEOUT=1.5 "
                      "TESSERA_FAULT=rank=2,op=all_reduce,n=20,stop");
  EXPECT_NE(o.status, 0) << o.output;
  EXPECT_NE(o.output.find("mpi: all_reduce #20 on world (rank_programs.cpp:"), std::string::npos)
      << o.output;
  EXPECT_NE(o.output.find("2 not seen for "), std::string::npos) << o.output;
  EXPECT_LT(o.seconds, 30);
}

// Rank 0 serves the store by which ranks know of each other.
TEST_F(Mpirun, AStoppedRank0EndsTheJobToo) {
  Outcome o = program(2, "loop",
                      "TESSERA_BACKEND=mpi TESSERA_TIMEOUT=1.5 "
                      "TESSERA_FAULT=rank=0,op=all_reduce,n=20,stop");
  EXPECT_NE(o.status, 0) << o.output;
  EXPECT_NE(o.output.find("mpi: all_reduce #20 on world"), std::string::npos) << o.output;
  EXPECT_NE(o.output.find("the store, which world rank 0 serves, does not answer"),
            std::string::npos)
      << o.output;
  EXPECT_LT(o.seconds, 20);
}

// MPI waits for all ranks at its beginning and end without a deadline.
TEST_F(Mpirun, ARankThatNeverBeginsEndsTheJob) {
  Outcome o = run(
      "OMP_NUM_THREADS=1 TEST_PROGRAM=verbs TESSERA_BACKEND=mpi TESSERA_JOIN_TIMEOUT=3",
      mpirun(2) + "sh -c 'test $OMPI_COMM_WORLD_RANK = 1 && exec sleep 50; exec " + self_ + "'");
  EXPECT_NE(o.status, 0) << o.output;
  expect_contains(o.output, "mpi: MPI_Init_thread has waited ");
  expect_contains(o.output, " s, and other ranks do not come to it; this rank ends");
  EXPECT_LT(o.seconds, 20);
}

TEST_F(Mpirun, ARankThatStopsOnItsWayToItsEndEndsTheJob) {
  Outcome o = program(2, "stops_at_the_end", "TESSERA_BACKEND=mpi TESSERA_TIMEOUT=3");
  EXPECT_NE(o.status, 0) << o.output;
  expect_contains(o.output, "mpi: MPI_Finalize has waited ");
  expect_contains(o.output, " s, and rank 1 is stopped by a signal (process ");
  EXPECT_LT(o.seconds, 20);
}

// It takes three times the timeout.
TEST_F(Mpirun, ARankThatWorksOnAloneIsWaitedFor) {
  Outcome o = program(2, "works_on_alone", "TESSERA_BACKEND=mpi TESSERA_TIMEOUT=2");
  EXPECT_EQ(o.status, 0) << o.output;
  expect_contains(o.output, "mpi: MPI_Finalize has waited ");
  expect_contains(o.output, " s for other ranks");
}

TEST_F(Mpirun, CallsThatDifferAreAnErrorOnEveryRank) {
  Outcome o = program(2, "mismatch", "TESSERA_BACKEND=mpi");
  EXPECT_EQ(o.status, 0) << o.output;
  for (const char* rank : {"rank 0: ", "rank 1: "})
    EXPECT_NE(o.output.find(std::string(rank) +
                            "all_reduce #2 on world: ranks made different calls: rank 0 called"),
              std::string::npos)
        << o.output;
}

TEST_F(Mpirun, ASendThatDoesNotFitItsRecvEndsTheJobWithAReport) {
  Outcome o = program(2, "send_that_does_not_fit", "TESSERA_BACKEND=mpi");
  EXPECT_NE(o.status, 0) << o.output;
  EXPECT_NE(o.output.find("make both equal"), std::string::npos) << o.output;
  EXPECT_LT(o.seconds, 20);
}

TEST_F(Mpirun, TrainsAsUnderTlaunch) {
  std::string train = bin_ +
                      "/train --model gpt-nano --data text:" + from_environment("TESSERA_SOURCE") +
                      "/README.md --steps 3 --deterministic | grep -o 'parameters [0-9a-f]*$'";
  Outcome by_mpirun = run("OMP_NUM_THREADS=1", mpirun(2) + train),
          by_tlaunch = run("OMP_NUM_THREADS=1", bin_ + "/tlaunch --nproc 2 " + train);
  EXPECT_EQ(by_mpirun.output, by_tlaunch.output);
  EXPECT_EQ(by_mpirun.output.substr(0, 11), "parameters ") << by_mpirun.output;
}

TEST_F(Mpirun, OneLauncherAndTheRightOne) {
  Outcome o = program(2, "verbs", "RANK=0 WORLD_SIZE=4");
  EXPECT_NE(o.status, 0);
  EXPECT_NE(o.output.find("WORLD_SIZE=4, but OMPI_COMM_WORLD_SIZE=2: two launchers"),
            std::string::npos)
      << o.output;
  o = run("TEST_PROGRAM=verbs TESSERA_BACKEND=mpi RANK=0 WORLD_SIZE=1", self_);
  EXPECT_EQ(o.status, 0) << "one rank needs no backend: " << o.output;
}

}  // namespace
}  // namespace tessera
