// A training job that was killed and resumed takes exactly the steps of an undisturbed one.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>

#include "tests/examples/command.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

struct Row {
  double loss, grad_norm;
  bool operator==(const Row&) const = default;
};
using Rows = std::map<int64_t, Row>;  // by step

class Resume : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!std::ifstream(bin("train"))) GTEST_SKIP() << "no train in TESSERA_BIN";
    std::ofstream text(dir_ / "text.txt");
    for (int i = 0; i < 3000; ++i) text << "line " << i * i % 997 << " of a text to learn\n";
  }
  std::string command(int ranks, const std::string& name, const std::string& flags) {
    return "OMP_NUM_THREADS=1 " + bin("tlaunch") + " --nproc " + std::to_string(ranks) + " " +
           bin("train") + " --data text:" + (dir_ / "text.txt") +
           " --batch-size 8 --seq-len 16 --set layers=1 --set dim=32 --set heads=2"
           " --set dropout=0.1 --schedule cosine --warmup 3 --steps 24 --metrics " +
           (dir_ / (name + ".jsonl")) + " --checkpoint " + (dir_ / name) + " --save-every 5 " +
           flags;
  }
  // Every step once, or the test fails.
  Rows rows(const std::string& name) {
    Rows out;
    std::ifstream in(dir_ / (name + ".jsonl"));
    for (std::string line; std::getline(in, line);) {
      auto j = nlohmann::json::parse(line);
      if (!j.contains("loss")) continue;
      EXPECT_TRUE(out.emplace(j["step"], Row{j["loss"], j["grad_norm"]}).second) << line;
    }
    return out;
  }
  Rows undisturbed(int ranks, const std::string& flags) {
    std::filesystem::remove_all(dir_ / "calm");
    Outcome o = run(command(ranks, "calm", flags));
    EXPECT_EQ(o.status, 0) << o.output;
    Rows r = rows("calm");
    EXPECT_EQ(r.size(), 24u);
    return r;
  }
  // Runs until a fault of rank `ranks - 1` in its n-th all-reduce ends it.
  void killed(int ranks, const std::string& flags, int n) {
    std::filesystem::remove_all(dir_ / "run");
    Outcome o = run("TESSERA_FAULT=rank=" + std::to_string(ranks - 1) + ",op=all_reduce,n=" +
                    std::to_string(n) + ",kill " + command(ranks, "run", flags));
    EXPECT_NE(o.status, 0) << o.output;
    EXPECT_TRUE(std::filesystem::exists(dir_ / "run/latest")) << o.output;
  }
  void resumed(int ranks, const std::string& flags, const Rows& expected) {
    Outcome o = run(command(ranks, "run", flags + " --resume"));
    EXPECT_EQ(o.status, 0) << o.output;
    EXPECT_NE(o.output.find("resumed from"), std::string::npos) << o.output;
    EXPECT_EQ(rows("run"), expected) << o.output;
  }
  TempFolder dir_;
};

TEST_F(Resume, OneRankKilledAtAnyTime) {
  Rows calm = undisturbed(1, "");
  // The whole run takes `whole`; kills spread over it.
  for (int attempt = 0; attempt < 4; ++attempt) {
    std::filesystem::remove_all(dir_ / "run");
    std::filesystem::remove(dir_ / "run.jsonl");
    pid_t child = fork();
    if (child == 0) {
      execl("/bin/sh", "sh", "-c", ("exec env " + command(1, "run", "> /dev/null")).c_str(),
            nullptr);
      _exit(127);
    }
    size_t until = size_t(6 + 4 * attempt), lines = 0;
    for (int i = 0; i < 6000 && lines < until; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      std::ifstream in(dir_ / "run.jsonl");
      lines = size_t(std::count(std::istreambuf_iterator<char>(in), {}, '\n'));
    }
    kill(child, SIGKILL);  // the launcher; its ranks go with it
    waitpid(child, nullptr, 0);
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    Outcome o = run(command(1, "run", "--resume"));
    EXPECT_EQ(o.status, 0) << o.output;
    EXPECT_EQ(rows("run"), calm) << o.output;
  }
}

TEST_F(Resume, TwoRanksGoOnExactly) {
  Rows calm = undisturbed(2, "");
  for (int n : {25, 31, 40}) {
    killed(2, "", n);
    resumed(2, "", calm);
  }
}

TEST_F(Resume, AnotherWorldSizeUnderDeterministic) {
  Rows calm = undisturbed(1, "--deterministic");
  killed(4, "--deterministic", 30);
  resumed(2, "--deterministic", calm);
  killed(2, "--deterministic", 30);
  resumed(1, "--deterministic", calm);
}

TEST_F(Resume, SgdToo) {
  Rows calm = undisturbed(1, "--optimizer sgd --lr 0.1");
  killed(2, "--optimizer sgd --lr 0.1", 30);
  Outcome o = run(command(2, "run", "--optimizer sgd --lr 0.1 --resume"));
  EXPECT_EQ(o.status, 0) << o.output;
  Rows r = rows("run");
  ASSERT_EQ(r.size(), calm.size());
  for (auto& [step, row] : calm) EXPECT_NEAR(r[step].loss, row.loss, 1e-4 * row.loss);
}

TEST_F(Resume, SaysWhatItDoes) {
  const std::string weights = " --weights " + (dir_ / "model.safetensors"), unused = "are not used";
  EXPECT_EQ(run(command(1, "other", "--save " + (dir_ / "model.safetensors"))).status, 0);
  Outcome o = run(command(1, "run", "--resume" + weights));
  EXPECT_EQ(o.status, 0) << o.output;
  EXPECT_NE(o.output.find("holds no saved step: a fresh start"), std::string::npos) << o.output;
  EXPECT_EQ(o.output.find(unused), std::string::npos) << o.output;
  o = run(command(1, "run", ""));
  EXPECT_NE(o.status, 0);
  EXPECT_NE(o.output.find("holds step 24 already; give --resume"), std::string::npos) << o.output;
  o = run(command(1, "run", "--resume --steps 26 --lr 0.5" + weights));
  EXPECT_EQ(o.status, 0) << o.output;
  expect_contains(o.output, "the weights of" + weights + " " + unused + ": the step has its own");
  EXPECT_NE(o.output.find("after step 24"), std::string::npos) << o.output;
  EXPECT_NE(o.output.find("--lr 0.5 (was 0.001), --steps 26 (was 24)"), std::string::npos)
      << o.output;
  EXPECT_EQ(rows("run").size(), 26u);
  o = run(command(1, "run", "--resume --set dim=64"));
  EXPECT_NE(o.status, 0);
  EXPECT_NE(o.output.find("was saved with --set dim=32, this run has dim=64"), std::string::npos)
      << o.output;
}

// Two steps fit on the disk, and the next is written before the oldest is removed.
TEST_F(Resume, AFullDiskWarnsAndTrainingGoesOn) {
  constexpr int kCannotMount = 99;
  const std::string disk = dir_ / "run";
  std::filesystem::create_directory(disk);
  std::string script = "mount -t tmpfs -o size=450k none " + disk + " || exit " +
                       std::to_string(kCannotMount) + "\n" + command(2, "run", "") +
                       "\necho status $?\n" + bin("tckpt") + " verify " + disk + "\n";
  dir_.write("script", script);
  Outcome o = run("unshare --map-root-user --mount sh " + (dir_ / "script"));
  if (o.status == kCannotMount || o.output.find("unshare failed") != std::string::npos)
    GTEST_SKIP() << "this system lets no test mount a file system: " << o.output;
  expect_contains(o.output,
                  "warning: checkpoint: cannot write '" + disk + "/.step-000000015.tmp/rank-");
  expect_contains(o.output, "No space left on device");
  expect_contains(o.output, "step 24/24");
  expect_contains(o.output, "status 1");  // the last save failed, too
  expect_contains(o.output, disk + ": sound, 2 saved steps");
  EXPECT_EQ(rows("run").size(), 24u);
}

}  // namespace
}  // namespace tessera
