// Compares `train` with PyTorch, flag by flag: the rate, loss and norm of the gradients of every
// step and the loss of validation. The files say how they were made; their script makes sure that
// no flag of a recipe can be ignored within the tolerances
// (scripts/reference/make_golden_train.py).
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/examples/command.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using nlohmann::json;

std::string golden_folder() {
  const char* source = std::getenv("TESSERA_SOURCE");
  return std::string(source ? source : ".") + "/tests/golden/train";
}

class TrainGolden : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!std::ifstream(bin("train"))) GTEST_SKIP() << "no train in TESSERA_BIN";
  }
  /// The lines of --metrics; on several ranks under tlaunch.
  std::vector<json> train(const std::string& flags, int ranks = 1) {
    const std::string metrics = folder_ / "metrics.jsonl";
    std::string launch;
    if (ranks > 1) launch = bin("tlaunch") + " --nproc " + std::to_string(ranks) + " ";
    const Outcome o = run("cd " + golden_folder() + " && " + launch + bin("train") + " " + flags +
                          " --metrics " + metrics);
    EXPECT_EQ(o.status, 0) << o.output;
    if (flags.find("--compile") != std::string::npos)
      expect_contains(o.output, "steps were replayed from 1 graph");
    std::vector<json> lines;
    std::ifstream file(metrics);
    for (std::string line; std::getline(file, line);) lines.push_back(json::parse(line));
    return lines;
  }
  TempFolder folder_;
};

/// The values of a field over the steps.
std::vector<double> numbers(const std::vector<json>& lines, const char* field) {
  std::vector<double> out;
  for (const json& line : lines)
    if (line.contains("loss")) out.push_back(line[field]);
  return out;
}

void expect_near(const char* what, const std::vector<double>& got, const std::vector<double>& want,
                 double tolerance) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t step = 0; step < want.size(); ++step)
    EXPECT_NEAR(got[step], want[step], tolerance * std::abs(want[step]))
        << what << " of step " << step + 1;
}

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double most = 0;
  for (size_t i = 0; i < a.size() && i < b.size(); ++i)
    most = std::max(most, std::abs(a[i] / b[i] - 1));
  return most;
}

bool of_resnet(const json& recipe) {
  return recipe["flags"].get<std::string>().find("--model resnet") != std::string::npos;
}

void expect_as_recorded(const std::vector<json>& lines, const json& recipe,
                        const json& tolerances) {
  ASSERT_FALSE(lines.empty());
  const json& tolerance = tolerances[recipe["precision"].get<std::string>()];
  const double loss = tolerance["loss"], norm = tolerance["norm"];
  // Some roundings of a formula in fp64, and the digits that the golden file has.
  expect_near("rate", numbers(lines, "lr"), recipe["lr"], 1e-14);
  expect_near("loss", numbers(lines, "loss"), recipe["loss"], loss);
  expect_near("norm", numbers(lines, "grad_norm"), recipe["grad_norm"], norm);
  const double validation = recipe["val_loss"];
  EXPECT_NEAR(lines.back()["val_loss"].get<double>(), validation, loss * validation);
  if (!recipe.contains("fp32_loss")) return;
  const double least = tolerances["fp32"]["loss"];  // 16 bits are not what fp32 gives
  EXPECT_GT(largest_difference(numbers(lines, "loss"), recipe["fp32_loss"]), 5 * least);
}

TEST_F(TrainGolden, EveryRecipe) {
  const json golden = json::parse(std::ifstream(golden_folder() + "/recipes.json"));
  ASSERT_GT(golden["recipes"].size(), 30u);
  for (const json& r : golden["recipes"]) {
    SCOPED_TRACE(r["name"].get<std::string>());
    const std::string weights = of_resnet(r) ? " --weights resnet" : " --weights gpt";
    expect_as_recorded(train(r["flags"].get<std::string>() + weights + ".safetensors"), r,
                       golden["tolerance"]);
  }
}

TEST_F(TrainGolden, EveryRecipeCompiled) {
  const json golden = json::parse(std::ifstream(golden_folder() + "/recipes.json"));
  for (const json& r : golden["recipes"]) {
    SCOPED_TRACE(r["name"].get<std::string>());
    const std::string weights = of_resnet(r) ? " --weights resnet" : " --weights gpt";
    expect_as_recorded(
        train(r["flags"].get<std::string>() + " --compile" + weights + ".safetensors"), r,
        golden["tolerance"]);
  }
}

// Each rank has half of a batch: rates are the same, losses the mean of theirs, norms those of the
// mean gradient. Batch-norm on half of a batch would be another recipe.
TEST_F(TrainGolden, EveryRecipeOfTheGptOnTwoRanks) {
  const json golden = json::parse(std::ifstream(golden_folder() + "/recipes.json"));
  int number = 0;
  for (const json& r : golden["recipes"]) {
    if (of_resnet(r)) continue;
    const std::string strategy = number++ % 2 ? "fsdp" : "ddp";
    SCOPED_TRACE(r["name"].get<std::string>() + " under " + strategy);
    expect_as_recorded(
        train(r["flags"].get<std::string>() + " --weights gpt.safetensors --strategy " + strategy,
              2),
        r, golden["tolerance"]);
  }
  EXPECT_GT(number, 20);
}

// The recipes have the rows that another seed draws; here are the weights.
TEST_F(TrainGolden, SeedsDecideWeightsAndRows) {
  const std::string data =
      "--set layers=1 --set heads=2 --set dim=16 --seq-len 8 --data tokens:tokens.bin ";
  const auto validation = [&](const std::string& flags) {
    return train(data + flags).back()["val_loss"].get<double>();
  };
  // The loss of the weights before the first step, on rows that do not depend on the seed.
  const double one = validation("--steps 0 --seed 1"), other = validation("--steps 0 --seed 2");
  EXPECT_EQ(validation("--steps 0 --seed 1"), one);
  EXPECT_GT(std::abs(one - other), 1e-4);
  const auto losses = [&](const std::string& flags) {
    return numbers(train(data + "--lr 0 --steps 3 " + flags), "loss");
  };
  EXPECT_EQ(losses("--seed 1"), losses("--seed 1"));
  const std::string weights = folder_ / "weights.safetensors";
  train(data + "--steps 0 --seed 1 --save " + weights);
  const std::vector<double> mine = losses("--seed 1 --weights " + weights),
                            others = losses("--seed 2 --weights " + weights);
  EXPECT_EQ(mine, losses("--seed 1"));
  for (size_t step = 0; step < 3; ++step) EXPECT_GT(std::abs(mine[step] - others[step]), 1e-4);
}

}  // namespace
}  // namespace tessera
