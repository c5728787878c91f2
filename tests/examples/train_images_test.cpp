// Training on images: any number of ranks and any strategy learns from the same samples with the
// same running statistics, runs are resumed on other numbers of ranks, and bad input gives one
// clear line.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "core/io/safetensors.h"
#include "tests/examples/command.h"
#include "tests/support/images.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

struct ImageRun {
  std::map<int64_t, double> losses;  // by step
  std::string hash;
  double val_loss = 0, val_accuracy = 0;
  bool operator==(const ImageRun&) const = default;
};

struct Spread {
  int ranks;
  const char* flags;
};

// At this rate, with as many images in a micro-batch, rounding errors do not grow; see
// SynchronisedBatchNormIsThatOfOneRank.
constexpr const char* kCalm = "--batch-size 16 --lr 0.002 ";

class TrainImages : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!std::ifstream(bin("train"))) GTEST_SKIP() << "no train in TESSERA_BIN";
    for (int b = 1; b <= 5; ++b)
      folder_.write("data_batch_" + std::to_string(b) + ".bin", cifar_records(9, 9 * (b - 1)));
    folder_.write("test_batch.bin", cifar_records(70, 100));
  }
  Outcome command(int ranks, const std::string& flags) {
    return run("OMP_NUM_THREADS=" + std::to_string(threads_) + " " + bin("tlaunch") + " --nproc " +
               std::to_string(ranks) + " " + bin("train") +
               " --model resnet18 --set width=4 --image-size 16 --batch-size 8" +
               " --optimizer sgd --lr 0.05 --label-smoothing 0.1 --clip-norm 0 " + flags);
  }
  ImageRun train(int ranks, const std::string& flags) {
    return train_on("cifar10:" + folder_.str(), ranks, flags);
  }
  ImageRun train_on(const std::string& data, int ranks, const std::string& flags) {
    const std::string metrics = folder_ / "metrics.jsonl";
    const Outcome o = command(ranks, "--data " + data + " --metrics " + metrics + " " + flags);
    EXPECT_EQ(o.status, 0) << o.output;
    last_output_ = o.output;
    ImageRun r;
    std::ifstream file(metrics);
    for (std::string line; std::getline(file, line);) {
      auto j = nlohmann::json::parse(line);
      if (j.contains("loss")) r.losses[j["step"]] = j["loss"];
      if (j.value("event", "") != "done") continue;
      r.hash = j["params_xxh128"], r.val_loss = j["val_loss"], r.val_accuracy = j["val_accuracy"];
    }
    return r;
  }
  TempFolder folder_;
  std::string last_output_;  // of train()
  int threads_ = 1;          // of each rank
};

TEST_F(TrainImages, Learns) {
  // What is trained on validates here: a class is a brightness. The rate falls to 0, so that what
  // is reached does not hang on the last steps' rounding, as it does at a constant rate.
  folder_.write("test_batch.bin", cifar_records(45));
  const ImageRun r =
      train(2,
            "--set width=8 --augment none --optimizer adamw --lr 0.003 --schedule cosine "
            "--batch-size 16 --weight-decay 0 --label-smoothing 0 --steps 100 --eval-every 20");
  EXPECT_GT(r.losses.at(1), 2.0);
  EXPECT_LT(r.losses.at(100), 0.5);
  EXPECT_GT(r.val_accuracy, 0.95);
  expect_contains(last_output_, "2 ranks, 100 steps of 16 images");
  expect_contains(last_output_, ": 45 images train, 45 validate, 10 classes");
  expect_contains(last_output_, "step 20: validation loss ");
  expect_contains(last_output_, " %, parameters " + r.hash);
}

TEST_F(TrainImages, DeterministicGivesEqualBits) {
  const std::string flags = "--steps 6 --nesterov --deterministic ";
  const ImageRun serial = train(1, flags);
  ASSERT_EQ(serial.losses.size(), 6u);
  EXPECT_EQ(train(2, flags + "--workers 3"), serial);
  EXPECT_EQ(train(4, flags), serial);
  EXPECT_EQ(train(2, flags + "--strategy fsdp"), serial);
  EXPECT_EQ(train(4, flags + "--strategy hsdp --mesh replicate=2,shard=2"), serial);
  EXPECT_EQ(train(2, "--steps 6 --nesterov --accumulate 2"),
            serial);  // a balanced tree of four leaves too
  const ImageRun bf16 = train(1, flags + "--precision bf16");
  threads_ = 3;  // libraries may split sums by them, but not in this mode
  EXPECT_EQ(train(1, flags), serial);
  EXPECT_EQ(train(2, flags + "--precision bf16"), bf16);
}

TEST_F(TrainImages, CompiledEqualsEager) {
  const std::string calm = kCalm;
  for (const auto& [ranks, flags] :
       std::vector<std::pair<int, std::string>>{{2, ""},
                                                {2, "--strategy fsdp "},
                                                {4, "--strategy hsdp --mesh replicate=2,shard=2 "},
                                                {2, "--accumulate 2 "},
                                                {2, "--precision bf16 "},
                                                {2, calm + "--strategy tp "},
                                                {2, calm + "--strategy tp --accumulate 2 "},
                                                {4, calm + "--strategy fsdp+tp --mesh dp=2,tp=2 "},
                                                {2, calm + "--strategy pp --accumulate 2 "}}) {
    const ImageRun eager = train(ranks, "--steps 5 " + flags),
                   compiled = train(ranks, "--steps 5 --compile " + flags);
    // Between the stages of a pipeline the program runs.
    expect_contains(last_output_, flags.find(" pp ") == flags.npos
                                      ? "steps were replayed"
                                      : "the program runs at each step");
    for (auto [step, loss] : eager.losses)
      EXPECT_NEAR(compiled.losses.at(step) / loss, 1,
                  flags.find("bf16") == flags.npos ? 1e-5 : 1e-2)
          << flags << step;
  }
}

// With the same statistics, the whole batch on one rank and its parts on several are one training.
// At this rate: a larger one lets rounding grow a hundredfold a step on these few images.
TEST_F(TrainImages, SynchronisedBatchNormIsThatOfOneRank) {
  const std::string flags = "--steps 6 --lr 0.005 --sync-batch-norm ";
  const ImageRun serial = train(1, flags), apart = train(2, "--steps 6 --lr 0.005");
  double most = 0;  // without it, in the same steps
  for (auto [step, loss] : serial.losses)
    most = std::max(most, std::abs(apart.losses.at(step) / loss - 1));
  EXPECT_GT(most, 1e-2);
  for (const auto& [ranks, more] :
       {Spread{2, ""}, Spread{2, "--strategy fsdp "}, Spread{2, "--compile "},
        Spread{4, "--strategy fsdp+tp --mesh dp=2,tp=2 "},
        Spread{4, "--strategy pp --mesh dp=2,pp=2 "}}) {
    const ImageRun run = train(ranks, flags + more);
    for (auto [step, loss] : serial.losses)
      EXPECT_NEAR(run.losses.at(step) / loss, 1, 5e-6) << more << step;
    EXPECT_NEAR(run.val_loss / serial.val_loss, 1, 1e-4) << more;
  }
}

// Weights and running statistics of a file, by name.
std::map<std::string, std::vector<double>> saved_values(const std::string& path) {
  std::map<std::string, std::vector<double>> out;
  for (const NamedTensor& t : io::load_safetensors(path)) {
    const Tensor wide = t.tensor.to(kF64).contiguous();
    out[t.name].assign(wide.data<double>(), wide.data<double>() + wide.numel());
  }
  return out;
}

// Describes how far the run is from the wanted one; "" where losses, and weights and running
// statistics whose names contain `part`, are as close as rounding permits.
std::string distance(const ImageRun& run, const ImageRun& want,
                     const std::map<std::string, std::vector<double>>& got_values,
                     const std::map<std::string, std::vector<double>>& want_values,
                     const std::string& part = "") {
  auto off = [](double got, double by) { return std::abs(got / by - 1); };
  if (run.losses.size() != want.losses.size() || got_values.size() != want_values.size())
    return "other steps or values";
  for (auto [step, loss] : want.losses)
    if (!(off(run.losses.at(step), loss) < 5e-6))
      return fmt::format("loss {} of step {}, not {}", run.losses.at(step), step, loss);
  for (const auto& [name, values] : want_values) {
    if (name.find(part) == name.npos) continue;
    double far = 0, size = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      far = std::max(far, std::abs(got_values.at(name).at(i) - values[i]));
      size = std::max(size, std::abs(values[i]));
    }
    if (!(far <= 1e-4 * size)) return fmt::format("{} is {} off, of {}", name, far, size);
  }
  if (part.empty() && !(off(run.val_loss, want.val_loss) < 1e-4))
    return fmt::format("validation loss {}, not {}", run.val_loss, want.val_loss);
  return "";
}

// Only sums over channels have another order: weights and running statistics are as close as
// losses. Where rounding moves a value across the 0 of a relu, gradients differ by far more than
// rounding: 7 of 160 pairs of runs had that within six steps. One of three seeds may have it. A net
// of bottlenecks amplifies rounding in its gradients from the first step on, so it takes only one
// step, and what is compared is computed before the update.
TEST_F(TrainImages, TensorParallelEqualsSerial) {
  const std::string file = folder_ / "saved.safetensors", save = " --save " + file;
  const std::map<int, std::vector<Spread>> spreads = {
      {1, {{2, "--strategy tp"}, {3, "--strategy tp"}}},
      {2, {{2, "--strategy tp --accumulate 2"}, {4, "--strategy fsdp+tp --mesh dp=2,tp=2"}}},
      {4, {{8, "--strategy hsdp+tp --mesh replicate=2,shard=2,tp=2"}}}};
  for (const bool bottlenecks : {false, true})
    for (const auto& [micro_batches, how] : spreads) {
      std::vector<std::string> far(how.size());
      std::vector<int> seeds_far(how.size(), 0);
      for (int seed = 1; seed <= (bottlenecks ? 1 : 3); ++seed) {
        const std::string flags =
            fmt::format("{} {} --seed {} ", kCalm,
                        bottlenecks ? "--steps 1 --model resnet50" : "--steps 6", seed);
        const ImageRun serial =
            train(1, flags + fmt::format("--accumulate {}", micro_batches) + save);
        EXPECT_EQ(serial.losses.size(), bottlenecks ? 1u : 6u);
        const auto want = saved_values(file);
        for (size_t i = 0; i < how.size(); ++i) {
          const ImageRun run = train(how[i].ranks, flags + how[i].flags + save);
          const std::string said =
              distance(run, serial, saved_values(file), want, bottlenecks ? "running" : "");
          if (said.empty()) continue;
          ++seeds_far[i];
          far[i] += fmt::format("{}{}: {}\n", flags, how[i].flags, said);
        }
      }
      for (size_t i = 0; i < how.size(); ++i)
        EXPECT_LE(seeds_far[i], bottlenecks ? 0 : 1) << far[i];
    }
}

// A stage does what one rank does with its blocks, in the order of the micro-batches: the bits are
// those of one rank with as many, running statistics included.
TEST_F(TrainImages, PipelineHasTheBitsOfSerial) {
  const std::string file = folder_ / "saved.safetensors", save = " --save " + file;
  for (const std::string more : {"", "--model resnet50 ", "--precision bf16 "}) {
    SCOPED_TRACE(more);
    const std::string flags = "--steps 6 --accumulate 2 " + more;
    const ImageRun serial = train(1, flags + save);
    ASSERT_EQ(serial.losses.size(), 6u);
    const auto want = saved_values(file);
    for (int stages : {2, 4}) {
      EXPECT_EQ(train(stages, flags + "--strategy pp" + save), serial) << stages;
      EXPECT_EQ(saved_values(file), want) << stages;
    }
    EXPECT_EQ(train(4, flags + "--strategy pp --mesh dp=2,pp=2"), train(2, flags));
  }
}

TEST_F(TrainImages, CutModelsLearn) {
  folder_.write("test_batch.bin", cifar_records(45));
  for (const char* how : {"--strategy tp", "--strategy pp --accumulate 2",
                          "--strategy tp --precision bf16", "--strategy tp --compile"})
    EXPECT_GT(train(2, std::string("--set width=8 --augment none --optimizer adamw --lr 0.003 "
                                   "--schedule cosine --batch-size 16 --weight-decay 0 "
                                   "--label-smoothing 0 --steps 100 ") +
                           how)
                  .val_accuracy,
              0.95)
        << how;
}

// Three steps in each way, three more in the next: the losses are those of six in one. All have
// two micro-batches.
TEST_F(TrainImages, ResumesUnderAnotherStrategy) {
  const std::vector<Spread> spreads = {
      {1, "--accumulate 2"},
      {2, "--strategy tp --accumulate 2"},
      {4, "--strategy fsdp+tp --mesh dp=2,tp=2"},
      {2, "--strategy pp --accumulate 2"},
      {4, "--strategy pp --mesh dp=2,pp=2"},
      {2, "--strategy fsdp"},
  };
  const std::string calm = kCalm;
  const ImageRun whole = train(1, calm + "--steps 6 " + spreads[0].flags);
  for (size_t i = 0; i < spreads.size(); ++i) {
    const Spread &from = spreads[i], &to = spreads[(i + 1) % spreads.size()];
    SCOPED_TRACE(std::string(from.flags) + " -> " + to.flags);
    const std::string flags =
        calm + "--checkpoint " + (folder_ / ("run" + std::to_string(i))) + " ";
    train(from.ranks, flags + "--steps 3 " + from.flags);
    const ImageRun rest = train(to.ranks, flags + "--steps 6 --resume " + to.flags);
    expect_contains(last_output_, "after step 3");
    ASSERT_EQ(rest.losses.size(), 6u);
    for (auto [step, loss] : whole.losses)
      EXPECT_NEAR(rest.losses.at(step) / loss, 1, 5e-6) << step;
    EXPECT_NEAR(rest.val_loss / whole.val_loss, 1, 1e-4);
  }
}

// What ranks save that each have a part can be loaded by one rank.
TEST_F(TrainImages, WeightsOfCutModelsAreLoadedBySerial) {
  for (const char* how : {"--strategy tp", "--strategy pp --accumulate 2"}) {
    const std::string file = folder_ / "saved.safetensors",
                      weights = "--steps 0 --weights " + file + " ";
    const ImageRun saved = train(2, std::string("--steps 3 --save ") + file + " " + how),
                   loaded = train(1, weights), spread = train(2, weights + how);
    EXPECT_EQ(loaded.hash, saved.hash) << how;
    EXPECT_EQ(spread.hash, saved.hash) << how;
    EXPECT_NEAR(loaded.val_loss / saved.val_loss, 1, 1e-6) << how;
    EXPECT_NEAR(spread.val_loss / saved.val_loss, 1, 1e-6) << how;
  }
}

// The error names the module and the op, not the code of the running statistics, which hold a NaN
// by then.
TEST_F(TrainImages, ANaNIsTracedToItsOp) {
  for (const auto& [ranks, flags] : {Spread{1, "--accumulate 2"}, Spread{2, "--strategy tp"},
                                     Spread{2, "--strategy pp --accumulate 2"}}) {
    const Outcome o = command(ranks, std::string("--steps 20 --lr 1e30 ") + flags);
    EXPECT_NE(o.status, 0) << flags;
    expect_contains(o.output, "train: step 2: the loss is nan; on rank 0, batch_norm of ");
    expect_contains(o.output, " in bn1 (forward) made the first NaN");
  }
}

TEST_F(TrainImages, ResumedOnOtherRanks) {
  const std::string flags = "--deterministic --checkpoint " + (folder_ / "run") + " --steps ";
  const ImageRun calm = train(1, "--deterministic --steps 9");
  train(1, flags + "4");
  ImageRun resumed = train(2, flags + "9 --resume");
  expect_contains(last_output_, "after step 4");
  EXPECT_EQ(resumed, calm);
  train(4, flags + "9 --resume --strategy fsdp");  // nothing is left to do
  expect_contains(last_output_, "after step 9");
}

TEST_F(TrainImages, BadImages) {
  for (const char* cls : {"a", "b"})
    for (int i = 0; i < 20; ++i)
      folder_.write(std::string("tree/") + cls + "/" + std::to_string(100 + i) + ".png",
                    png_of(picture(16, 16)));
  const std::string data = "--data images:" + (folder_ / "tree") + " --steps 5 ";
  Outcome o = command(2, data);
  if (o.output.find("TESSERA_WITH_IMAGES") != std::string::npos)
    GTEST_SKIP() << "built without libjpeg, libpng and libarchive";
  EXPECT_EQ(o.status, 0) << o.output;
  EXPECT_EQ(o.output.find("skipped"), std::string::npos) << o.output;
  folder_.write("tree/a/103.png", folder_.read("tree/a/103.png").substr(0, 200));
  o = command(2, data);
  EXPECT_NE(o.status, 0);
  expect_contains(o.output,
                  "tree/a/103.png': PNG: the file ends too early (--bad-images skip leaves such");
  o = command(2, data + "--bad-images skip");
  EXPECT_EQ(o.status, 0) << o.output;
  expect_contains(o.output, "the file ends too early; skipped");
  expect_contains(o.output, " images that could not be read");
  // An archive that is cut off: within the first class.
  const std::string tar = folder_ / "tree.tar";
  ASSERT_EQ(run("tar -C " + (folder_ / "tree") + " --sort=name -cf " + tar + " .").status, 0);
  std::filesystem::resize_file(tar, std::filesystem::file_size(tar) * 2 / 5);
  o = command(1, "--steps 5 --data images:" + tar);
  EXPECT_NE(o.status, 0);
  expect_contains(o.output, " images come before that (--bad-images skip trains on what comes");
  o = command(1, "--steps 5 --bad-images skip --data images:" + tar);
  EXPECT_NE(o.status, 0);
  expect_contains(o.output, "has one class, 'a'");
  expect_contains(o.output, "an archive that is cut off has lost the others");
}

// Evaluation uses 256 pixels for every 224 that the model sees, as is usual: here 112 of 128, so
// that nothing is resized and the outermost 8 pixels are not seen.
TEST_F(TrainImages, LargeImagesAreEvaluatedAtTheirMiddle) {
  auto loss_with = [&](int first, int last, const std::string& flags) {
    for (const std::string part : {"train", "test"})
      for (int i = 0; i < 4; ++i) {
        data::Image image = picture(128, 128);
        for (int64_t y = 0; y < 128; ++y)
          for (int64_t x = 0; x < 128; ++x) {
            const int64_t edge = std::min({x, y, 127 - x, 127 - y});
            uint8_t* p = image.row(y) + 3 * x;
            if (part == "test" && edge >= first && edge <= last)
              p[0] = p[1] = p[2] = uint8_t(255 - p[0]);
          }
        folder_.write(
            "large/" + part + "/" + (i % 2 ? "cat" : "ant") + "/" + std::to_string(i) + ".png",
            png_of(image));
      }
    return train_on("images:" + (folder_ / "large"), 1,
                    "--image-size 112 --batch-size 2 --steps 1 " + flags)
        .val_loss;
  };
  const double plain = loss_with(0, -1, "");
  EXPECT_EQ(loss_with(0, 7, ""), plain);
  EXPECT_NE(loss_with(8, 8, ""), plain);
  EXPECT_NE(loss_with(0, 7, "--augment none"), loss_with(0, -1, "--augment none"));
}

TEST_F(TrainImages, WrongOptionsAreErrors) {
  auto fails = [&](int ranks, const std::string& flags, const std::string& text) {
    const Outcome o = command(ranks, flags);
    EXPECT_NE(o.status, 0) << flags;
    expect_contains(o.output, text);
  };
  const std::string data = "--steps 1 --data cifar10:" + folder_.str() + " ";
  fails(5, data + "--strategy tp",
        "--strategy tp: 4 channels cannot be cut over tp=5; give --set width=5 or fewer ranks");
  fails(2, data + "--strategy tp --exact-contraction",
        "a convolution sums over channels that ranks share");
  fails(9, data + "--strategy pp --batch-size 9",
        "8 residual blocks cannot be cut into pp=9 stages; give a deeper --model or fewer ranks");
  fails(1, data + "--augment some", "--augment \"some\": expected one of auto, none, crop");
  fails(1, data + "--set classes=7", "--set classes=7, but cifar10:");
  fails(1, data + "--sync-batch-norm --deterministic", "Leave one of them out");
  fails(1, "--sync-batch-norm --model mlp",
        "--sync-batch-norm is for models of images, not for --model mlp");
  fails(1, data + "--model mlp",
        "--model mlp does not learn from --data cifar10:; give synthetic:");
  fails(1, "--model mlp", "--image-size, --augment and --label-smoothing are for");
  fails(1, "--data text:x", "--model resnet18 does not learn from --data text:; give images:PATH");
  fails(1, "--data images:" + (folder_ / "none"), "none': No such file");
}

}  // namespace
}  // namespace tessera
