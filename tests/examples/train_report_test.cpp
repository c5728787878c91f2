// What a training run writes about itself: metrics, event files, profiles.
#include <filesystem>
#include <iterator>

#include "tests/examples/train_runs.h"

namespace tessera {
namespace {

class TrainReport : public Train {};

// One rank writes; that the file decodes is tested with io::EventWriter.
TEST_F(TrainReport, EventFilesForTensorBoard) {
  std::string folder = folder_ / "runs";
  train(2, "--steps 3 --eval-every 2 --tensorboard " + folder);
  std::vector<std::string> files;
  for (auto& entry : std::filesystem::directory_iterator(folder)) files.push_back(entry.path());
  ASSERT_EQ(files.size(), 1u);
  std::ifstream file(files[0], std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(file)), {});
  auto count = [&](const std::string& tag) {
    size_t n = 0;
    for (size_t at = bytes.find(tag); at != std::string::npos; at = bytes.find(tag, at + 1)) ++n;
    return n;
  };
  EXPECT_EQ(count("train/loss"), 3u);
  EXPECT_EQ(count("train/grad_norm"), 3u);
  EXPECT_EQ(count("validation/loss"), 2u);
}

TEST_F(TrainReport, ValidatesBetweenStepsAndOnceAtTheEnd) {
  train(1, "--steps 6 --eval-every 2");
  std::ifstream file(folder_ / "metrics.jsonl");
  std::vector<int> steps;  // 0: the end
  for (std::string line; std::getline(file, line);) {
    const auto j = nlohmann::json::parse(line);
    if (j.contains("val_loss"))
      steps.push_back(j.value("event", "") == "done" ? 0 : int(j["step"]));
  }
  EXPECT_EQ(steps, (std::vector<int>{2, 4, 0}));
}

TEST_F(TrainReport, RatesAreThoseOfTheStepsTime) {
  train(2, "--steps 3");
  std::ifstream file(folder_ / "metrics.jsonl");
  int steps = 0;
  for (std::string line; std::getline(file, line);) {
    const auto j = nlohmann::json::parse(line);
    if (!j.contains("loss")) continue;
    ++steps;
    const double seconds = j["step_ms"].get<double>() / 1000;
    EXPECT_NEAR(j["samples_per_s"].get<double>() * seconds, 8, 1e-9) << j;
    EXPECT_NEAR(j["tokens_per_s"].get<double>() * seconds, 8 * 16, 1e-9) << j;
  }
  EXPECT_EQ(steps, 3);
}

// Tensor parallelism alone leaves no gradient to reduce: its collectives are part of the step.
TEST_F(TrainReport, CommunicationOfGradientsIsTimed) {
  for (std::string strategy : {"ddp", "fsdp", "tp"}) {
    train(2, "--steps 3 --strategy " + strategy);
    std::ifstream file(folder_ / "metrics.jsonl");
    int steps = 0;
    for (std::string line; std::getline(file, line);) {
      const auto j = nlohmann::json::parse(line);
      if (!j.contains("loss")) continue;
      ++steps;
      if (strategy == "tp")
        EXPECT_EQ(j["comm_ms"], 0) << j;
      else
        EXPECT_GT(j["comm_ms"], 0) << strategy << ": " << j;
    }
    EXPECT_EQ(steps, 3) << strategy;
  }
}

TEST_F(TrainReport, ProfileOfAllRanks) {
  for (std::string flags : {"", " --compile"}) {
    std::string path = folder_ / "profile.json";
    train(2, "--steps 20 --profile " + path + flags);
    expect_contains(last_output_, "profile of 2 ranks in " + path);
    expect_contains(last_output_, "steps 4 to 13 of rank 0");
    auto json = nlohmann::json::parse(std::ifstream(path));
    int steps[2] = {}, products[2] = {}, reductions[2] = {};
    for (const auto& e : json["traceEvents"]) {
      if (e["ph"] != "X") continue;
      int rank = e["pid"];
      ASSERT_TRUE(rank == 0 || rank == 1) << e;
      steps[rank] += e["name"] == "step";
      products[rank] += e["name"] == "contract";
      reductions[rank] += e["name"] == "all_reduce" && e["cat"] == "collective";
    }
    for (int rank : {0, 1}) {
      EXPECT_EQ(steps[rank], 10);
      EXPECT_GE(products[rank], 10 * 2 * 4 * 3);  // two blocks of four linear layers
      EXPECT_GE(reductions[rank], 10);
    }
  }
  train(1, "--steps 2 --profile " + (folder_ / "short.json"));
  expect_contains(last_output_, "steps 2 to 2 of rank 0");
  Outcome o = run(bin("train") + " --data " + data() + " --steps 1 --profile /no/such/folder/x");
  EXPECT_NE(o.status, 0);
  expect_contains(o.output, "--profile /no/such/folder/x: rank 0 cannot write it: No such file");
}

}  // namespace
}  // namespace tessera
