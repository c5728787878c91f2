// Runs of the training program on a small text, on any number of ranks, and what they report.
#pragma once
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/examples/command.h"
#include "tests/support/temp_folder.h"

namespace tessera {

struct TrainRun {
  std::vector<double> losses;
  std::string hash;
  double val_loss = 0;
};

class Train : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!std::ifstream(bin("train"))) GTEST_SKIP() << "no train in TESSERA_BIN";
    std::ofstream text(folder_ / "text.txt");
    for (int i = 0; i < 3000; ++i) text << "line " << i * i % 997 << " of a text to learn\n";
  }
  std::string data() const { return "text:" + (folder_ / "text.txt"); }
  /// What is trained, and on what.
  virtual std::string task() const { return "--data " + data(); }
  virtual std::string shape() const {
    return "--seq-len 16 --set layers=2 --set dim=32 --set heads=2";
  }
  TrainRun train(int ranks, const std::string& flags) {
    std::string metrics = (folder_ / "metrics.jsonl");
    Outcome o =
        run(bin("tlaunch") + " --nproc " + std::to_string(ranks) + " " + bin("train") + " " +
            task() + " --batch-size 8 " + shape() + " --metrics " + metrics + " " + flags);
    EXPECT_EQ(o.status, 0) << o.output;
    last_output_ = o.output;
    TrainRun r;
    std::ifstream file(metrics);
    for (std::string line; std::getline(file, line);) {
      auto j = nlohmann::json::parse(line);
      if (j.contains("loss")) r.losses.push_back(j["loss"]);
      if (j.value("event", "") != "done") continue;
      r.hash = j["params_xxh128"];
      if (!j["val_loss"].is_null()) r.val_loss = j["val_loss"];
    }
    return r;
  }
  TempFolder folder_;
  std::string last_output_;  // of train()
};

}  // namespace tessera
