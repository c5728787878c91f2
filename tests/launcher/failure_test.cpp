// Failures, signals and restarts: which rank is blamed, what tlaunch returns, and that no process
// is left.
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <thread>

#include "tests/launcher/command.h"

namespace tessera::testing {
namespace {

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

void sleep_s(double s) { std::this_thread::sleep_for(std::chrono::duration<double>(s)); }

/// An argument of `sleep` that no other process has, by which the test finds its own.
std::string unique_seconds() {
  static int n = 0;
  return "7" + std::to_string(::getpid()) + "." + std::to_string(++n);
}

/// True when at most `seconds` from now no process has `text` in its command line.
bool gone_within(const std::string& text, double seconds) {
  for (int i = 0; i < int(seconds * 50); ++i, sleep_s(0.02))
    if (count_processes(text) == 0) return true;
  return false;
}

TEST(Failure, ExitStatusIsTheFirstFailingWorkers) {
  Result r = tlaunch(
      {"--nproc", "3", "sh", "-c",
       "test $RANK = 1 && { echo last words >&2; exit 3; }; sleep 0.3; echo sorry; exit 4"});
  EXPECT_EQ(r.exit_code, 3);
  EXPECT_TRUE(contains(r.err, "rank 1 failed first: exit status 3")) << r.err;
  EXPECT_TRUE(contains(r.err, "; its last lines are above\n")) << r.err;
  EXPECT_EQ(r.err.find("last words"), r.err.rfind("last words")) << r.err;
  EXPECT_TRUE(contains(r.err, "ranks 0,2 failed later: exit status 4")) << r.err;
  EXPECT_TRUE(contains(r.out, "[rank2] sorry")) << "survivors may speak: " << r.out;
}

TEST(Failure, LastLinesAreRepeatedWhereTheyAreNotInView) {
  const std::string fail = "test $RANK = 1 && { echo last words >&2; exit 3; }; sleep 0.2; ";
  const std::vector<std::string> cases[] = {
      {"sh", "-c", fail + "for i in $(seq 20); do echo $i >&2; done"},  // far above
      {"--local-ranks-filter", "0", "sh", "-c", fail},
      {"sh", "-c", "test $RANK = 0 || { echo last words; exit 3; }"}};  // another pipe than stderr
  for (std::vector<std::string> arguments : cases) {
    arguments.insert(arguments.begin(), {"--nproc", "2"});
    const Result r = tlaunch(arguments);
    EXPECT_EQ(r.exit_code, 3);
    EXPECT_TRUE(contains(r.err, "tlaunch: last output of rank 1:\n    | last words\n")) << r.err;
    EXPECT_FALSE(contains(r.err, "above")) << r.err;
  }
  const Result silent = tlaunch({"--nproc", "2", "sh", "-c", "exit $RANK"});
  EXPECT_TRUE(contains(silent.err, "; it printed nothing\n")) << silent.err;
}

TEST(Failure, SignalsAre128PlusN) {
  Result r = tlaunch({"--nproc", "2", "sh", "-c", "test $RANK = 0 && kill -SEGV $$; sleep 600"});
  EXPECT_EQ(r.exit_code, 128 + SIGSEGV);
  EXPECT_TRUE(contains(r.err, "rank 0 failed first: signal 11 (Segmentation fault)")) << r.err;
  EXPECT_TRUE(contains(r.err, "rank 1 stopped by tlaunch: signal 15")) << r.err;
  EXPECT_GT(r.seconds, 1.8);
  EXPECT_LT(r.seconds, 30);
}

TEST(Failure, StubbornAndStoppedSurvivorsAreKilled) {
  Result r = tlaunch({"--nproc", "3", "--grace", "0.3", "sh", "-c",
                      "case $RANK in 0) exit 9;; 1) trap '' TERM; while :; do sleep 0.1; done;; 2) "
                      "kill -STOP $$;; esac"});
  EXPECT_EQ(r.exit_code, 9);
  EXPECT_TRUE(contains(r.err, "rank 1 stopped by tlaunch: signal 9")) << r.err;
  EXPECT_TRUE(contains(r.err, "rank 2 stopped by tlaunch: signal 15")) << r.err;
  EXPECT_LT(r.seconds, 30);
}

// No collective waits for the stopped rank any more.
TEST(Failure, ARankThatASignalStoppedOnItsWayToItsEndIsKilled) {
  const Result r = tlaunch(
      {"--nproc", "3", "--timeout", "1", "sh", "-c", "test $RANK = 1 && kill -STOP $$; exit 0"});
  EXPECT_EQ(r.exit_code, 128 + SIGKILL);
  EXPECT_TRUE(contains(r.err, "tlaunch: rank 1 was stopped by a signal, and has not gone on"))
      << r.err;
  EXPECT_TRUE(contains(r.err, "rank 1 failed first: signal 9 (Killed)")) << r.err;
  EXPECT_LT(r.seconds, 30);
}

TEST(Failure, ItIsSaidOnceWhoStillRunsWhenOthersHaveEnded) {
  const Result r =
      tlaunch({"--nproc", "3", "--timeout", "1", "sh", "-c", "test $RANK = 1 || sleep 15; exit 0"});
  EXPECT_EQ(r.exit_code, 0) << r.err;
  for (const char* part : {"tlaunch: ranks 0,2 still run, 1", " s after others have ended\n"})
    EXPECT_TRUE(contains(r.err, part)) << r.err;
  EXPECT_EQ(r.err.find(" still run"), r.err.rfind(" still run")) << r.err;
}

TEST(Failure, ScriptWithoutInterpreterLine) {
  std::string path = ::testing::TempDir() + "/tlaunch-script-" + std::to_string(::getpid());
  Command({"sh", "-c", "echo true > " + path + "; chmod +x " + path}).finish();
  Result r = tlaunch({"--nproc", "2", path});
  EXPECT_EQ(r.exit_code, 2);
  EXPECT_TRUE(contains(r.err, "#!/bin/sh")) << r.err;
  ::unlink(path.c_str());
}

TEST(Failure, RestartsAllRanks) {
  Result r = tlaunch(
      {"--nproc", "2", "--max-restarts", "3", "sh", "-c",
       "echo try$TESSERA_RESTART_COUNT; test $RANK = 0 || test $TESSERA_RESTART_COUNT = 2"});
  EXPECT_EQ(r.exit_code, 0) << r.err;
  for (const char* line : {"[rank0] try0", "[rank1] try1", "[rank0] try2"})
    EXPECT_TRUE(contains(r.out, line)) << r.out;
  EXPECT_FALSE(contains(r.out, "try3"));
  r = tlaunch({"--max-restarts", "1", "sh", "-c", "echo t; exit 6"});
  EXPECT_EQ(r.exit_code, 6);
  EXPECT_EQ(r.out, "t\nt\n");
}

TEST(Signals, AreForwardedOnceAndThenTheyKill) {
  Command job(tlaunch_argv(
      {"--nproc", "2", "sh", "-c",
       "trap 'echo got; exit 0' TERM; echo ready$RANK; while :; do sleep 0.05; done"}));
  job.wait_for("ready0");
  job.wait_for("ready1");
  ::kill(job.pid(), SIGTERM);
  Result r = job.finish();
  EXPECT_EQ(r.exit_code, 128 + SIGTERM);
  EXPECT_TRUE(contains(r.out, "[rank0] got") && contains(r.out, "[rank1] got")) << r.out;

  Command stubborn(
      tlaunch_argv({"--nproc", "2", "sh", "-c",
                    "trap 'echo got' INT; echo ready$RANK; while :; do sleep 0.05; done"}));
  stubborn.wait_for("ready0");
  stubborn.wait_for("ready1");
  ::kill(stubborn.pid(), SIGINT);
  stubborn.wait_for("got");
  sleep_s(0.3);
  ::kill(stubborn.pid(), SIGINT);
  r = stubborn.finish(30);
  EXPECT_EQ(r.exit_code, 128 + SIGINT);
}

// `timeout` signals its child and then the group of both.
TEST(Signals, TheSameOneTwiceAtOnceIsOne) {
  Command job(tlaunch_argv({"sh", "-c",
                            "trap 'sleep 0.5; echo saved; exit 0' TERM; echo ready; while :; do "
                            "sleep 0.05; done"}));
  job.wait_for("ready");
  for (int i = 0; i < 2; ++i) {
    ::kill(job.pid(), SIGTERM);
    sleep_s(0.02);
  }
  Result r = job.finish(30);
  EXPECT_EQ(r.exit_code, 128 + SIGTERM);
  EXPECT_EQ(r.out, "ready\nsaved\n");
}

TEST(Signals, GracePeriodEndsWithKill) {
  Command job(tlaunch_argv(
      {"--grace", "0.3", "sh", "-c", "trap '' HUP; echo ready; while :; do sleep 0.05; done"}));
  job.wait_for("ready");
  ::kill(job.pid(), SIGHUP);
  Result r = job.finish(30);
  EXPECT_EQ(r.exit_code, 128 + SIGHUP);
}

TEST(Signals, UserSignalsPassThrough) {
  Command job(tlaunch_argv(
      {"sh", "-c", "trap 'echo saving; exit 0' USR1; echo ready; while :; do sleep 0.05; done"}));
  job.wait_for("ready");
  ::kill(job.pid(), SIGUSR1);
  Result r = job.finish(30);
  EXPECT_EQ(r.exit_code, 0);
  EXPECT_EQ(r.out, "ready\nsaving\n");
}

TEST(Orphans, NoneWhenTlaunchIsKilled) {
  std::string s = unique_seconds();
  Command job(
      tlaunch_argv({"--nproc", "2", "sh", "-c",
                    "sleep " + s + " & setsid sleep " + s + " & echo ready$RANK; sleep " + s}));
  job.wait_for("ready0");
  job.wait_for("ready1");
  sleep_s(0.1);
  EXPECT_GE(count_processes("sleep " + s), 6);
  ::kill(job.pid(), SIGKILL);
  EXPECT_TRUE(gone_within("sleep " + s, 30));
}

// Neither parent nor group, session or environment tell which job they belong to.
TEST(Orphans, NoneThatHaveLeftEverythingBehind) {
  const std::string s = unique_seconds();
  const std::string leave = "(env -i setsid sleep " + s + " >/dev/null 2>&1 </dev/null &) ; ";
  const std::string twice =
      "(env -i setsid sh -c 'setsid sleep " + s + " & exec sleep " + s + "' &) ; ";
  Command job(
      tlaunch_argv({"--nproc", "2", "sh", "-c", leave + twice + "echo ready$RANK; sleep " + s}));
  job.wait_for("ready0");
  job.wait_for("ready1");
  for (int i = 0; i < 250 && count_processes("sleep " + s) < 8; ++i) sleep_s(0.02);
  EXPECT_GE(count_processes("sleep " + s), 8);
  ::kill(job.pid(), SIGKILL);
  EXPECT_TRUE(gone_within("sleep " + s, 30));

  Result failed = tlaunch({"sh", "-c", leave + "sleep 0.2; exit 3"});
  EXPECT_EQ(failed.exit_code, 3);
  EXPECT_TRUE(gone_within("sleep " + s, 30));
}

// A process that a job inside a job starts belongs to both, and to no other job.
TEST(Orphans, NoneOfAnInnerJobAndAllOfAnother) {
  const std::string s = unique_seconds(), other = unique_seconds();
  const std::string leave = "(env -i setsid sleep " + s + " >/dev/null 2>&1 </dev/null &) ; ";
  Command bystander(tlaunch_argv({"sh", "-c", "echo ready; exec sleep " + other}));
  bystander.wait_for("ready");
  const std::string inner = tlaunch_argv({})[0];
  Command job(
      tlaunch_argv({"sh", "-c", inner + " sh -c '" + leave + "echo ready; sleep " + s + "'"}));
  job.wait_for("ready");
  for (int i = 0; i < 250 && count_processes("sleep " + s) < 4; ++i) sleep_s(0.02);
  ::kill(job.pid(), SIGKILL);
  EXPECT_TRUE(gone_within("sleep " + s, 30));

  Result failed =
      tlaunch({"sh", "-c", inner + " sh -c '" + leave + "sleep 0.2; exit 3'; echo alive"});
  EXPECT_EQ(failed.out, "alive\n") << failed.err;
  EXPECT_TRUE(gone_within("sleep " + s, 30));
  EXPECT_GE(count_processes("sleep " + other), 1);
}

TEST(Orphans, NoneAfterAFailure) {
  std::string s = unique_seconds();
  Result r =
      tlaunch({"--nproc", "2", "sh", "-c",
               "sleep " + s + " & setsid sleep " + s + " & test $RANK = 1 && exit 1; sleep " + s});
  EXPECT_EQ(r.exit_code, 1);
  EXPECT_TRUE(gone_within("sleep " + s, 30));
}

TEST(Orphans, BackgroundChildrenEndWithTheirWorker) {
  std::string s = unique_seconds();
  Result r = tlaunch({"sh", "-c", "sleep " + s + " & echo done"});
  EXPECT_EQ(r.exit_code, 0);
  EXPECT_EQ(r.out, "done\n");
  EXPECT_LT(r.seconds, 30);
  EXPECT_TRUE(gone_within("sleep " + s, 30));
}

TEST(Orphans, GuardLeavesWithTlaunch) {
  EXPECT_EQ(tlaunch({"true"}).exit_code, 0);
  EXPECT_TRUE(gone_within("tlaunch true", 30));
}

}  // namespace
}  // namespace tessera::testing
