// tckpt on checkpoints: what it prints, and conversion to Hugging Face's files and back.
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "collectives/loopback/run_ranks.h"
#include "core/io/safetensors.h"
#include "parallel/checkpoint/checkpointer.h"
#include "parallel/checkpoint/load.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

class TckptCheckpoint : public testing::Test {
 protected:
  void SetUp() override {
    const char* folder = std::getenv("TESSERA_BIN");
    if (!folder || !fs::exists(std::string(folder) + "/tckpt"))
      GTEST_SKIP() << "TESSERA_BIN has no tckpt";
    program_ = std::string(folder) + "/tckpt";
    run_ranks(2, [&](ProcessGroup& g) {
      int64_t r = g.rank();
      checkpoint::Checkpointer c(root_, &g);
      checkpoint::State s;
      s.pieces.push_back({"model.wte", {4, 2}, {2 * r, 0}, rows(r)});
      s.pieces.push_back(checkpoint::whole("model.bias", from_values<float>({7, 8, 9}, {3})));
      s.pieces.push_back(checkpoint::whole("optimizer.step", from_values<double>({12}, {})));
      s.extra = {{"data.cursor", "96"}, {"metadata.tokenizer", "byte"}};
      for (int64_t step : {5, 12}) c.save(step, s);
      c.wait();
    });
  }
  static Tensor rows(int64_t r) {
    float x = float(4 * r);
    return from_values<float>({x, x + 1, x + 2, x + 3}, {2, 2});
  }
  void expect_weights(const io::SafetensorsSet& set) {
    EXPECT_EQ(set.names(), (std::vector<std::string>{"bias", "wte"}));
    Tensor wte = set.load("wte");
    ASSERT_EQ(wte.shape(), (Shape{4, 2}));
    for (int i = 0; i < 8; ++i) EXPECT_EQ(wte.data<float>()[i], float(i));
    EXPECT_EQ(set.files()[0].metadata().at("tokenizer"), "byte");
    EXPECT_EQ(set.files()[0].metadata().at("format"), "pt");
  }
  std::string run(const std::string& arguments, int expected_status = 0) {
    std::string text;
    FILE* pipe = popen(("(" + program_ + " " + arguments + ") 2>&1").c_str(), "r");
    std::array<char, 4096> chunk;
    while (size_t n = fread(chunk.data(), 1, chunk.size(), pipe)) text.append(chunk.data(), n);
    int status = pclose(pipe);
    EXPECT_EQ(WIFEXITED(status) ? WEXITSTATUS(status) : -1, expected_status) << text;
    return text;
  }
  TempFolder dir_;
  std::string root_ = dir_ / "c", program_;
};

TEST_F(TckptCheckpoint, Inspect) {
  std::string text = run("inspect " + root_);
  expect_contains(text, "step 12, saved by 2 ranks");
  expect_contains(text, "rank-0000-of-0002.safetensors[0:2, 0:2]");
  expect_contains(text, "optimizer.step");
  expect_contains(text, "3 tensors, 52 bytes in 2 files");
  expect_contains(text, "extra data.cursor = 96");
  expect_contains(text, "other saved steps: 5");
  expect_contains(run("inspect " + root_ + "/step-000000005"), "step 5, saved by 2 ranks");
}

TEST_F(TckptCheckpoint, VerifyNamesTheDamage) {
  expect_contains(run("verify " + root_), "sound, 2 saved steps");
  std::string name = "c/step-000000005/rank-0001-of-0002.safetensors", bytes = dir_.read(name);
  bytes.back() = char(bytes.back() ^ 1);
  dir_.write(name, bytes);
  std::string text = run("verify " + root_, 1);
  expect_contains(text, "rank-0001-of-0002.safetensors' bytes [");
  expect_contains(text, "tensor 'model.");
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
  run("verify " + root_ + "/step-000000012");
  fs::remove(root_ + "/step-000000012/manifest.json");
  expect_contains(run("verify " + root_, 1), "manifest.json");
  expect_contains(run("verify " + root_ + "/step-000000012", 1), "No such file");
}

TEST_F(TckptCheckpoint, Consolidate) {
  std::string file = dir_ / "model.safetensors";
  expect_contains(run("consolidate " + root_ + " --to " + file), "2 tensors, 44 bytes in 1 file\n");
  expect_weights(io::SafetensorsSet::open(file));
  expect_contains(run("verify " + file), "as stored");
  run("consolidate " + root_ + " --prefix '' --to " + file);
  EXPECT_TRUE(io::SafetensorsSet::open(file).contains("optimizer.step"));
  expect_contains(run("consolidate " + root_ + " --prefix none. --to " + file, 1),
                  "no tensor whose");
  expect_contains(run("consolidate " + root_ + " --to " + (dir_ / "folder"), 1), ".safetensors");
}

TEST_F(TckptCheckpoint, ErrorsSayWhatToGive) {
  expect_contains(
      run("consolidate " + root_ + " --to " + (dir_ / "x.safetensors") + " --prefix foo.", 1),
      "begins with 'foo.'; give the prefix that its names have (tckpt --prefix");
  fs::remove(root_ + "/latest");
  expect_contains(run("verify " + root_, 1), "latest': No such file; it names the newest save");
}

TEST_F(TckptCheckpoint, ConvertThereAndBack) {
  std::string one = dir_ / "one", shards = dir_ / "shards", back = dir_ / "back";
  run("convert " + root_ + " " + one);
  expect_weights(io::SafetensorsSet::open(one));
  run("convert " + root_ + " " + shards + " --max-shard-bytes 40");
  io::SafetensorsSet set = io::SafetensorsSet::open(shards);
  EXPECT_EQ(set.files().size(), 2u);
  expect_weights(set);
  auto index = nlohmann::json::parse(dir_.read("shards/model.safetensors.index.json"));
  EXPECT_EQ(index["metadata"]["total_size"], 44);
  EXPECT_EQ(index["weight_map"]["wte"], "model-00002-of-00002.safetensors");
  expect_contains(run("convert " + root_ + " " + shards, 1), "exists");
  EXPECT_FALSE(fs::exists(shards + ".tmp"));

  run("convert " + shards + " " + back + " --step 3");
  expect_contains(run("verify " + back), "sound, 1 saved step,");
  Tensor bias = empty({3});
  std::vector<checkpoint::Piece> pieces{checkpoint::whole("model.bias", bias)};
  checkpoint::Loaded l = checkpoint::load(back, pieces, nullptr, {.only = "*.bias"});
  EXPECT_EQ(l.step, 3);
  EXPECT_EQ(l.extra.at("metadata.tokenizer"), "byte");
  EXPECT_EQ(bias.data<float>()[2], 9);
  expect_contains(run("convert " + shards + " " + back + " --step 2", 1), "holds step 3 already");
  EXPECT_TRUE(fs::exists(back));
  expect_contains(run("convert " + shards + " " + (dir_ / "new") + " --step -1", 1), "step -1");
  EXPECT_FALSE(fs::exists(dir_ / "new"));
}

TEST_F(TckptCheckpoint, DamageStopsAConversion) {
  std::string name = "c/step-000000012/rank-0000-of-0002.safetensors", bytes = dir_.read(name);
  for (size_t i = bytes.size() - 16; i < bytes.size(); ++i) bytes[i] = char(bytes[i] ^ 1);
  dir_.write(name, bytes);
  expect_contains(run("convert " + root_ + " " + (dir_ / "out") + " --prefix ''", 1), "is damaged");
  EXPECT_FALSE(fs::exists(dir_ / "out"));
  EXPECT_FALSE(fs::exists(dir_ / "out.tmp"));
}

}  // namespace
}  // namespace tessera
