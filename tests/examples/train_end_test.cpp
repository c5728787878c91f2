// How a run ends when something goes wrong: a full disk, a signal, an earlier end. Whatever can
// still be saved is saved.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "core/io/safetensors.h"
#include "tests/examples/command.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

class TrainEnd : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!std::ifstream(bin("train"))) GTEST_SKIP() << "no train in TESSERA_BIN";
    std::string text;
    for (int i = 0; i < 300; ++i) text += "line " + std::to_string(i * i % 97) + " of a text\n";
    folder_.write("text.txt", text);
  }
  std::string command(const std::string& flags) const {
    return bin("train") + " --data text:" + (folder_ / "text.txt") +
           " --set layers=1 --set dim=32 --set heads=2 --seq-len 16 --batch-size 4 " + flags;
  }
  // Starts a command that writes metrics.jsonl, and waits for some steps of it.
  pid_t start(const std::string& command) const {
    const std::string metrics = folder_ / "metrics.jsonl";
    std::filesystem::remove(metrics);
    const std::string line = "exec " + command + " > " + (folder_ / "out.txt") + " 2>&1";
    const pid_t child = fork();
    if (child == 0) {
      signal(SIGINT, SIG_DFL);  // a test that runs behind a shell ignores it
      execl("/bin/sh", "sh", "-c", line.c_str(), nullptr);
      _exit(127);
    }
    for (int i = 0, lines = 0; i < 30000 && lines < 5; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      std::ifstream in(metrics);
      lines = int(std::count(std::istreambuf_iterator<char>(in), {}, '\n'));
    }
    return child;
  }
  TempFolder folder_;
};

TEST_F(TrainEnd, WeightsThatTheLastUpdateRuinedAreNotSaved) {
  const std::string file = folder_ / "ruined.safetensors";
  const Outcome o = run(command("--steps 1 --lr 1e38 --clip-norm 0 --save " + file));
  EXPECT_NE(o.status, 0) << o.output;
  expect_contains(o.output, "after the last step, 1, the validation loss is");
  EXPECT_FALSE(std::filesystem::exists(file));
}

// 100 KiB a file (`ulimit -f`): weights fit, a checkpoint, three times as large, does not.
TEST_F(TrainEnd, ACheckpointThatCannotBeSavedLosesNothingElse) {
  const std::string file = folder_ / "model.safetensors";
  const Outcome o = run(
      "bash -c 'ulimit -f 100; " +
      command("--steps 3 --sample 5 --save " + file + " --checkpoint " + (folder_ / "run")) + "'");
  EXPECT_NE(o.status, 0);
  expect_contains(o.output, "File too large");
  expect_contains(o.output, "sample:");
  EXPECT_EQ(run(command("--steps 0 --weights " + file)).status, 0);
}

TEST_F(TrainEnd, WeightsThatDoNotFitLeaveNothingBehind) {
  TempFolder empty;
  const Outcome o = run("bash -c 'ulimit -f 20; " +
                        command("--steps 1 --save " + (empty / "w.safetensors")) + "'");
  EXPECT_EQ(o.status, 1);
  expect_contains(o.output, "w.safetensors' (after 20480 bytes): File too large; raise");
  EXPECT_EQ(empty.count(), 0u);
}

TEST_F(TrainEnd, AFullDiskUnderTheReportsEndsThemAndNotTheRun) {
  const std::string file = folder_ / "model.safetensors";
  const Outcome o =
      run(command("--steps 6 --metrics /dev/full --profile /dev/full --save " + file));
  EXPECT_EQ(o.status, 0) << o.output;
  const std::string told = "warning: --metrics /dev/full: No space left on device";
  expect_contains(o.output, told);
  EXPECT_EQ(o.output.find(told, o.output.find(told) + 1), std::string::npos) << o.output;
  expect_contains(o.output, "warning: --profile /dev/full: rank 0 cannot write it: No space left");
  expect_contains(o.output, "done: 6 steps");
  EXPECT_TRUE(std::filesystem::exists(file));
}

TEST_F(TrainEnd, OutputThatCannotBeWrittenIsAnError) {
  const std::string file = folder_ / "model.safetensors";
  for (const std::string& command : {command("--steps 2 --save " + file), bin("train") + " --help",
                                     bin("bench") + " --version", bin("tckpt") + " --help"}) {
    const Outcome o = run(command + " > /dev/full");
    EXPECT_EQ(o.status, 1) << command;
    expect_contains(o.output, "standard output: cannot write it");
  }
  EXPECT_TRUE(std::filesystem::exists(file));
}

// A file that the run opens must not become its standard output.
TEST_F(TrainEnd, ClosedOutputIsAnError) {
  const std::string file = folder_ / "model.safetensors", metrics = folder_ / "metrics.jsonl";
  for (const std::string& command :
       {command("--steps 2 --metrics " + metrics + " --save " + file), bin("train") + " --help",
        bin("bench") + " --version", bin("tckpt") + " --help"}) {
    const Outcome o = run(command + " >&-");
    EXPECT_EQ(o.status, 1) << command;
    expect_contains(o.output, "standard output: cannot write it");
  }
  EXPECT_TRUE(std::filesystem::exists(file));
  std::ifstream lines(metrics);
  for (std::string line; std::getline(lines, line);) EXPECT_TRUE(line.starts_with("{")) << line;
}

// Gloo ignores SIGPIPE, which is simulated here.
TEST_F(TrainEnd, AReaderThatLeavesIsNoError) {
  const std::string status = folder_ / "status";
  const Outcome o = run("sh -c 'trap \"\" PIPE; " + command("--steps 300") + "; echo $? > " +
                        status + "' | head -n 1");
  EXPECT_EQ(folder_.read("status"), "0\n") << o.output;
  EXPECT_EQ(std::count(o.output.begin(), o.output.end(), '\n'), 1) << o.output;
}

TEST_F(TrainEnd, NothingLeftToTrainIsSaid) {
  const std::string at = " --checkpoint " + (folder_ / "run");
  EXPECT_EQ(run(command("--steps 4" + at)).status, 0);
  const Outcome o = run(command("--steps 2 --resume" + at));
  EXPECT_EQ(o.status, 0) << o.output;
  expect_contains(o.output, "nothing is left to train: 4 steps done, this run has 2");
  expect_contains(o.output, "done: 4 steps");
}

// One rank of two is sent it: both end after the same step.
TEST_F(TrainEnd, ASignalSavesTheStepItFinds) {
  const std::string at = " --checkpoint " + (folder_ / "run");
  const std::string script = folder_.write(
      "rank.sh", "echo $$ > " + (folder_ / "pid.$RANK") + "; exec " +
                     command("--steps 1000000 --metrics " + (folder_ / "metrics.jsonl") + at));
  for (int rank : {1, 0}) {
    std::filesystem::remove_all(folder_ / "run");
    const pid_t child = start(bin("tlaunch") + " --nproc 2 sh " + script);
    kill(std::stoi(folder_.read("pid." + std::to_string(rank))), SIGTERM);
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_NE(status, 0);
    const std::string out = folder_.read("out.txt"), said = "stopped by signal 15 (Terminated) ";
    const size_t begin = out.find(said);
    ASSERT_NE(begin, std::string::npos) << out;
    const std::string rest = out.substr(begin + said.size());
    const Outcome next = run(command("--steps 1 --resume" + at));
    EXPECT_EQ(next.status, 0) << next.output;
    expect_contains(next.output, ", " + rest.substr(0, rest.find(',')));  // "after step N"
  }
}

// One line, of rank 0, and the end that the sender expects.
TEST_F(TrainEnd, AnInterruptWithoutACheckpointSaysThatNothingIsSaved) {
  const std::string endless = command("--steps 1000000 --metrics " + (folder_ / "metrics.jsonl"));
  for (const std::string& launcher : {std::string(), bin("tlaunch") + " --nproc 2 "}) {
    const pid_t child = start(launcher + endless);
    kill(child, SIGINT);
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_TRUE(WIFSIGNALED(status) ? WTERMSIG(status) == SIGINT : WEXITSTATUS(status) == 130);
    const std::string out = folder_.read("out.txt"), said = "no step is saved; with --checkpoint";
    expect_contains(out, said);
    EXPECT_EQ(out.find(said), out.rfind(said)) << out;
  }
}

// `timeout` sends it so: to the process, and at once to its group.
TEST_F(TrainEnd, ASignalSentTwiceAtOnceIsOne) {
  const pid_t child =
      start(command("--steps 1000000 --batch-size 64 --metrics " + (folder_ / "metrics.jsonl") +
                    " --checkpoint " + (folder_ / "run")));
  kill(child, SIGTERM);
  std::this_thread::sleep_for(std::chrono::milliseconds(1));  // or the two may be one pending
  kill(child, SIGTERM);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM);  // as the sender expects it
  expect_contains(folder_.read("out.txt"), "stopped by signal 15 (Terminated) after step ");
}

// Flips a bit at each place in the private memory of a process that holds `bytes`; returns the
// number of places.
int damage(pid_t process, const std::string& bytes) {
  const std::string proc = "/proc/" + std::to_string(process);
  std::ifstream maps(proc + "/maps");
  std::fstream memory(proc + "/mem", std::ios::in | std::ios::out | std::ios::binary);
  int found = 0;
  for (std::string line; std::getline(maps, line);) {
    uint64_t begin = 0, end = 0;
    char access[5] = {};
    if (std::sscanf(line.c_str(), "%lx-%lx %4s", &begin, &end, access) != 3) continue;
    if (std::string(access) != "rw-p" || end - begin > (1u << 30)) continue;  // no ranges set aside
    std::string held(end - begin, '\0');
    memory.clear();
    memory.seekg(int64_t(begin)).read(held.data(), int64_t(held.size()));
    if (!memory) continue;
    for (size_t at = held.find(bytes); at != held.npos; at = held.find(bytes, at + 1), ++found)
      memory.seekp(int64_t(begin + at)).put(char(bytes[0] ^ 1)).flush();
  }
  return found;
}

// Bad memory or a stray write does this: all losses look right, but the ranks train two models.
TEST_F(TrainEnd, AReplicaThatChangesInMidRunIsNotSaved) {
  const std::string model = folder_ / "w.safetensors", run_folder = folder_ / "run";
  ASSERT_EQ(run(command("--steps 0 --save " + model)).status, 0);
  const std::vector<NamedTensor> weights = io::load_safetensors(model);
  const auto weight = std::ranges::find(weights, "wpe.weight", &NamedTensor::name);
  ASSERT_NE(weight, weights.end());
  const std::string bytes(reinterpret_cast<const char*>(weight->tensor.data<float>()), 64);
  const std::string script = folder_.write(
      "rank.sh", "echo $$ > " + (folder_ / "pid.$RANK") + "; exec " +
                     command("--steps 1000000 --lr 0 --weights " + model + " --metrics " +
                             (folder_ / "metrics.jsonl") + " --checkpoint " + run_folder));
  const pid_t child = start(bin("tlaunch") + " --nproc 2 sh " + script);
  const pid_t second = std::stoi(folder_.read("pid.1"));
  kill(second, SIGSTOP);
  EXPECT_GE(damage(second, bytes), 1);
  kill(second, SIGCONT);
  kill(second, SIGTERM);  // asks for a save
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 1);
  const std::string out = folder_.read("out.txt");
  expect_contains(out, "steps the ranks hold other values of what they should hold alike, ");
  expect_contains(out, "model.wpe.weight: rank 0 has xxh128 ");
  EXPECT_FALSE(std::filesystem::exists(run_folder + "/latest")) << out;
}

// Rank 0 cannot end its step, because the other rank is stopped: a second signal ends it there.
TEST_F(TrainEnd, ASecondSignalEndsTheRunAtOnce) {
  const std::string script = folder_.write(
      "rank.sh", "echo $$ > " + (folder_ / "pid.$RANK") + "; exec " +
                     command("--steps 1000000 --metrics " + (folder_ / "metrics.jsonl") +
                             " --checkpoint " + (folder_ / "run")));
  const pid_t child = start(bin("tlaunch") + " --nproc 2 sh " + script);
  kill(std::stoi(folder_.read("pid.1")), SIGSTOP);
  const pid_t first = std::stoi(folder_.read("pid.0"));
  kill(first, SIGTERM);
  std::this_thread::sleep_for(std::chrono::milliseconds(1200));  // sooner, the two would be one
  kill(first, SIGTERM);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_NE(status, 0);
  const std::string out = folder_.read("out.txt");
  expect_contains(out, "rank 0 failed first: signal 15");
  EXPECT_EQ(out.find("after step"), std::string::npos) << out;
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run/latest")) << out;
}

}  // namespace
}  // namespace tessera
