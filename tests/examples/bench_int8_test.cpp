// bench int8 on a narrow network: every kind of run is timed, and invalid ones are refused.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/examples/command.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

const std::string kNarrow = " int8 --model resnet18 --set width=8 --image-size 32 --batch-size 2";

TEST(BenchInt8, TimesEveryKindAndReports) {
  TempFolder folder;
  const std::string json = folder / "int8.json";
  Outcome o = run(bin("bench") + kNarrow + " --samples 1 --report --keep-f32 fc --json " + json);
  ASSERT_EQ(o.status, 0) << o.output;
  for (const char* text : {"images/s", "conv1: ", "layer4.1.conv2: ", "fc: f32, as keep_f32 asks"})
    EXPECT_NE(o.output.find(text), std::string::npos) << text << "\n" << o.output;
  Json result = Json::parse(std::ifstream(json))["result"];
  for (const char* kind : {"fp32", "fp32 compiled", "bf16", "bf16 compiled", "int8", "fp32 bare"})
    EXPECT_GT(result["ms"][kind]["median"].get<double>(), 0) << kind;
  EXPECT_FALSE(result.contains("accuracy"));
}

TEST(BenchInt8, Refusals) {
  Outcome o = run(bin("bench") + " int8 --model gpt2");
  EXPECT_NE(o.status, 0);
  EXPECT_NE(o.output.find("int8 knows resnet18"), std::string::npos) << o.output;
  o = run(bin("bench") + kNarrow + " --data images:nowhere");
  EXPECT_NE(o.output.find("--weights and --data go together"), std::string::npos) << o.output;
  o = run(bin("bench") + kNarrow + " --samples 0");
  EXPECT_NE(o.output.find("--samples"), std::string::npos) << o.output;
  EXPECT_NE(o.output.find("expected at least 1, threads up to"), std::string::npos) << o.output;
}

}  // namespace
}  // namespace tessera
