// The training program under its launcher: any number of ranks trains the same model.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "core/io/safetensors.h"
#include "tests/examples/train_runs.h"

namespace tessera {
namespace {

TEST_F(Train, ParallelEqualsSerial) {
  TrainRun serial = train(1, "--steps 50");
  ASSERT_EQ(serial.losses.size(), 50u);
  EXPECT_LT(serial.losses.back(), serial.losses.front());
  for (int ranks : {2, 4}) {
    TrainRun r = train(ranks, "--steps 50");
    ASSERT_EQ(r.losses.size(), 50u);
    EXPECT_NEAR(r.losses[0] / serial.losses[0], 1, 1e-6);
    EXPECT_NEAR(r.losses[49] / serial.losses[49], 1, 1e-3);
  }
}

// As close to eager as sharded runs are to serial.
TEST_F(Train, CompiledEqualsEager) {
  struct Case {
    int ranks;
    const char* flags;
    bool replayed;
  };
  for (const Case& c : {Case{1, "--set dropout=0.1", true}, Case{2, "--accumulate 2", true},
                        Case{2, "--strategy fsdp", true}, Case{2, "--strategy tp", true},
                        Case{4, "--strategy fsdp+tp --mesh dp=2,tp=2", true},
                        Case{4, "--strategy hsdp --mesh replicate=2,shard=2", true},
                        Case{8, "--strategy hsdp+tp --mesh replicate=2,shard=2,tp=2", true},
                        Case{2, "--strategy pp", false}}) {
    TrainRun eager = train(c.ranks, std::string("--steps 8 --clip-norm 1 ") + c.flags);
    TrainRun compiled = train(c.ranks, std::string("--steps 8 --clip-norm 1 --compile ") + c.flags);
    ASSERT_EQ(compiled.losses.size(), 8u) << c.flags;
    EXPECT_NEAR(compiled.losses[0] / eager.losses[0], 1, 1e-6) << c.flags;
    EXPECT_NEAR(compiled.losses[7] / eager.losses[7], 1, 1e-5) << c.flags;
    bool replayed = last_output_.find("steps were replayed") != std::string::npos;
    EXPECT_EQ(replayed, c.replayed) << last_output_;
  }
}

// Fused ops have another order of sums, which the gradients of layer-norm's weights over a batch
// are the first to show. Without those passes nothing differs.
TEST_F(Train, CompiledWithoutFusionHasTheBitsOfEager) {
  for (const char* flags : {"--strategy tp", "--strategy fsdp"}) {
    const std::string steps = std::string("--steps 8 --clip-norm 1 ") + flags;
    TrainRun eager = train(2, steps);
    setenv("TESSERA_COMPILE_SKIP", "decompose,accumulate,fuse", 1);
    TrainRun compiled = train(2, steps + " --compile");
    unsetenv("TESSERA_COMPILE_SKIP");
    EXPECT_NE(last_output_.find("steps were replayed"), std::string::npos) << last_output_;
    EXPECT_EQ(compiled.losses, eager.losses) << flags;
    EXPECT_EQ(compiled.hash, eager.hash) << flags;
  }
}

// The compiler is a script that notes the hash of each source that it is given.
TEST_F(Train, RanksThatStartTogetherCompileEachSourceOnce) {
  const std::string compiler = folder_.write(
      "compiler", "#!/bin/sh\nfor word; do case $word in\n*.cpp) md5sum < \"$word\" >> '" +
                      (folder_ / "sources") + "' ;;\nesac; done\nexec c++ \"$@\"\n");
  std::filesystem::permissions(compiler, std::filesystem::perms::owner_all);
  for (int start = 0; start < 2; ++start) {  // the second finds everything in the cache
    Outcome o =
        run("TESSERA_COMPILE_CXX=" + compiler + " TESSERA_COMPILE_CACHE=" + (folder_ / "cache") +
            " " + bin("tlaunch") + " --nproc 8 " + bin("train") + " " + task() +
            " --batch-size 8 " + shape() + " --steps 3 --compile");
    EXPECT_EQ(o.status, 0) << o.output;
    std::ifstream file(folder_ / "sources");
    std::multiset<std::string> sources;
    for (std::string line; std::getline(file, line);) sources.insert(line);
    EXPECT_FALSE(sources.empty());
    for (const std::string& s : sources) EXPECT_EQ(sources.count(s), 1u) << s;
  }
}

TEST_F(Train, DeterministicGivesEqualBits) {
  for (const char* flags :
       {"--steps 10 --deterministic", "--steps 10 --deterministic --set dropout=0.2",
        "--steps 10 --deterministic --precision bf16"}) {
    TrainRun serial = train(1, flags);
    ASSERT_EQ(serial.losses.size(), 10u);
    for (int ranks : {2, 4}) {
      TrainRun r = train(ranks, flags);
      EXPECT_EQ(r.losses, serial.losses) << flags;
      EXPECT_EQ(r.hash, serial.hash) << flags;
      EXPECT_EQ(r.val_loss, serial.val_loss) << flags;
    }
  }
}

// Strategies keep gradients in different places (buckets, pieces), so that passes find different
// graphs and compilation begins at different steps.
TEST_F(Train, CompiledDeterministicGivesEqualBits) {
  const std::string flags = "--steps 8 --deterministic --set dropout=0.2 ";
  TrainRun serial = train(1, flags);  // eager
  ASSERT_EQ(serial.losses.size(), 8u);
  struct Case {
    int ranks;
    const char* strategy;
  };
  for (auto [ranks, strategy] :
       {Case{1, ""}, Case{2, "--strategy ddp"}, Case{2, "--strategy fsdp"}}) {
    TrainRun r = train(ranks, flags + "--compile " + strategy);
    expect_contains(last_output_, "steps were replayed");
    EXPECT_EQ(r.losses, serial.losses) << strategy;
    EXPECT_EQ(r.hash, serial.hash) << strategy;
    EXPECT_EQ(r.val_loss, serial.val_loss) << strategy;
  }
}

struct Spread {
  int ranks;
  const char* flags;
};
const Spread kSpreads[] = {{2, "--strategy fsdp"},
                           {4, "--strategy fsdp --mesh dp=4"},
                           {4, "--strategy hsdp --mesh replicate=2,shard=2"},
                           {2, "--strategy tp"},
                           {4, "--strategy fsdp+tp --mesh dp=2,tp=2"},
                           {8, "--strategy hsdp+tp --mesh replicate=2,shard=2,tp=2"},
                           {2, "--strategy pp --accumulate 4"},
                           {4, "--strategy pp --mesh dp=2,pp=2 --accumulate 2"}};

TEST_F(Train, EveryStrategyEqualsSerial) {
  TrainRun drawn = train(1, "--steps 0"), serial = train(1, "--steps 50 --set dropout=0.1");
  for (const Spread& s : kSpreads) {
    SCOPED_TRACE(s.flags);
    EXPECT_EQ(train(s.ranks, std::string("--steps 0 ") + s.flags).hash, drawn.hash);
    TrainRun r = train(s.ranks, std::string("--steps 50 --set dropout=0.1 ") + s.flags);
    ASSERT_EQ(r.losses.size(), 50u);
    EXPECT_NEAR(r.losses[0] / serial.losses[0], 1, 1e-6);
    EXPECT_NEAR(r.losses[49] / serial.losses[49], 1, 1e-3);
    EXPECT_NEAR(r.val_loss / serial.val_loss, 1, 1e-3);
  }
}

/// A small BERT on masked text.
class TrainBert : public Train {
 protected:
  void SetUp() override {
    Train::SetUp();
    std::ofstream vocabulary(folder_ / "vocab.txt");
    vocabulary << "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nline\nof\na\ntext\nto\nlearn\n";
    for (int digit = 0; digit < 10; ++digit) vocabulary << digit << "\n##" << digit << "\n";
  }
  std::string task() const override {
    return "--model bert-mini --set hidden=64 --data mlm:" + (folder_ / "text.txt") +
           " --tokenizer " + (folder_ / "vocab.txt");
  }
};

TEST_F(TrainBert, LearnsAndEveryStrategyEqualsSerial) {
  TrainRun serial = train(1, "--steps 50");
  ASSERT_EQ(serial.losses.size(), 50u);
  EXPECT_LT(serial.val_loss, 0.9 * serial.losses[0]);
  std::vector<Spread> spreads{{2, ""}};
  spreads.insert(spreads.end(), std::begin(kSpreads), std::end(kSpreads));
  for (const Spread& s : spreads) {
    SCOPED_TRACE(s.flags);
    TrainRun r = train(s.ranks, std::string("--steps 50 ") + s.flags);
    ASSERT_EQ(r.losses.size(), 50u);
    EXPECT_NEAR(r.losses[0] / serial.losses[0], 1, 1e-6);
    EXPECT_NEAR(r.losses[49] / serial.losses[49], 1, 1e-3);
    EXPECT_NEAR(r.val_loss / serial.val_loss, 1, 1e-3);
  }
}

TEST_F(TrainBert, DeterministicGivesEqualBits) {
  TrainRun serial = train(1, "--steps 10 --deterministic");
  ASSERT_EQ(serial.losses.size(), 10u);
  for (const char* flags : {"", " --strategy fsdp"}) {
    TrainRun r = train(2, std::string("--steps 10 --deterministic") + flags);
    EXPECT_EQ(r.losses, serial.losses) << flags;
    EXPECT_EQ(r.hash, serial.hash) << flags;
  }
}

TEST_F(TrainBert, CompiledEqualsEager) {
  for (const char* flags : {"", "--strategy pp --accumulate 2"}) {
    TrainRun eager = train(2, std::string("--steps 8 ") + flags),
             compiled = train(2, std::string("--steps 8 --compile ") + flags);
    ASSERT_EQ(compiled.losses.size(), 8u);
    EXPECT_NEAR(compiled.losses[0] / eager.losses[0], 1, 1e-6) << flags;
    EXPECT_NEAR(compiled.losses[7] / eager.losses[7], 1, 1e-5) << flags;
    expect_contains(last_output_, *flags ? "the program runs at each step" : "steps were replayed");
  }
}

// Ten steps in each way, ten more in the next.
TEST_F(TrainBert, ResumesUnderAnotherStrategy) {
  const Spread spreads[] = {{1, ""}, kSpreads[6], kSpreads[3], kSpreads[7]};
  TrainRun whole = train(1, "--steps 20");
  ASSERT_EQ(whole.losses.size(), 20u);
  for (size_t i = 0; i < std::size(spreads); ++i) {
    const Spread &from = spreads[i], &to = spreads[(i + 1) % std::size(spreads)];
    SCOPED_TRACE(std::string(from.flags) + " -> " + to.flags);
    std::string folder = " --checkpoint " + (folder_ / ("saved" + std::to_string(i))) + " ";
    train(from.ranks, "--steps 10" + folder + from.flags);
    TrainRun rest = train(to.ranks, "--steps 20 --resume" + folder + to.flags);
    ASSERT_EQ(rest.losses.size(), 20u);
    for (size_t s = 10; s < 20; ++s) EXPECT_NEAR(rest.losses[s] / whole.losses[s], 1, 1e-4) << s;
  }
}

TEST_F(TrainBert, StagesInMixedPrecision) {
  TrainRun exact = train(1, "--steps 50");
  for (const char* precision : {"--precision bf16", "--precision fp16"}) {
    TrainRun r = train(2, std::string("--steps 50 --strategy pp --accumulate 2 ") + precision);
    ASSERT_EQ(r.losses.size(), 50u);
    EXPECT_NE(r.hash, exact.hash) << precision << " computed in fp32";
    EXPECT_NEAR(r.losses[0] / exact.losses[0], 1, 1e-3) << precision;
    EXPECT_NEAR(r.losses[49] / exact.losses[49], 1, 5e-3) << precision;
    EXPECT_NEAR(r.val_loss / exact.val_loss, 1, 5e-3) << precision;
  }
}

// The copies of the words on the first and the last stage are one tensor in what is saved.
TEST_F(TrainBert, WhatStagesSaveIsLoadedBySerial) {
  for (const std::string name : {"saved/", "saved.safetensors"}) {
    const std::string path = folder_ / name, weights = "--steps 0 --weights " + path + " ";
    // A folder says itself what the model is.
    auto load = [&](int ranks, const std::string& flags) {
      return run(bin("tlaunch") + " --nproc " + std::to_string(ranks) + " " + bin("train") + " " +
                 "--model bert-mini --seq-len 16 --data mlm:" + (folder_ / "text.txt") +
                 " --tokenizer " + (folder_ / "vocab.txt") + " " + weights + flags);
    };
    TrainRun saved = train(2, "--steps 3 --strategy pp --save " + path);
    for (const Spread& s : {Spread{1, ""}, Spread{2, "--strategy pp"}}) {
      const Outcome o = load(s.ranks, s.flags);
      EXPECT_EQ(o.status, 0) << o.output;
      expect_contains(o.output, saved.hash);
    }
  }
}

TEST_F(Train, FullyShardedGivesTheBitsOfSerial) {
  const std::string flags = "--steps 10 --deterministic --set dropout=0.2 ";
  TrainRun serial = train(1, flags);
  ASSERT_EQ(serial.losses.size(), 10u);
  for (const Spread& s : {kSpreads[0], kSpreads[1], kSpreads[2]}) {
    TrainRun r = train(s.ranks, flags + s.flags);
    EXPECT_EQ(r.losses, serial.losses) << s.flags;
    EXPECT_EQ(r.hash, serial.hash) << s.flags;
    EXPECT_EQ(r.val_loss, serial.val_loss) << s.flags;
  }
}

TEST_F(Train, ExactContractionGivesTensorParallelTheBitsOfSerial) {
  const std::string flags = "--steps 10 --deterministic --exact-contraction --set dropout=0.2 ";
  TrainRun serial = train(1, flags);
  ASSERT_EQ(serial.losses.size(), 10u);
  for (const char* spread : {"--strategy tp", "--strategy fsdp+tp --mesh dp=2,tp=2"}) {
    TrainRun r = train(spread == std::string("--strategy tp") ? 2 : 4, flags + spread);
    EXPECT_EQ(r.losses, serial.losses) << spread;
    EXPECT_EQ(r.hash, serial.hash) << spread;
    EXPECT_EQ(r.val_loss, serial.val_loss) << spread;
  }
}

// Ten steps in each way, ten more in the next: the losses are those of twenty in one.
TEST_F(Train, ResumesUnderAnotherStrategy) {
  TrainRun whole = train(1, "--steps 20");
  ASSERT_EQ(whole.losses.size(), 20u);
  for (size_t i = 0; i < std::size(kSpreads); ++i) {
    const Spread &from = kSpreads[i], &to = kSpreads[(i + 1) % std::size(kSpreads)];
    SCOPED_TRACE(std::string(from.flags) + " -> " + to.flags);
    std::string folder = " --checkpoint " + (folder_ / ("saved" + std::to_string(i))) + " ";
    train(from.ranks, "--steps 10" + folder + from.flags);
    TrainRun rest = train(to.ranks, "--steps 20 --resume" + folder + to.flags);
    ASSERT_EQ(rest.losses.size(), 20u);  // the metrics file goes on
    for (size_t s = 10; s < 20; ++s) EXPECT_NEAR(rest.losses[s] / whole.losses[s], 1, 1e-4) << s;
  }
}

TEST_F(Train, MixedPrecisionLearnsAsFp32DoesUnderEveryStrategy) {
  TrainRun exact = train(1, "--steps 50");
  for (std::string precision : {"--precision bf16 ", "--precision fp16 "}) {
    TrainRun serial = train(1, "--steps 50 " + precision);
    ASSERT_EQ(serial.losses.size(), 50u);
    EXPECT_NE(serial.hash, exact.hash) << precision << "computed in fp32";
    EXPECT_NEAR(serial.losses[49] / exact.losses[49], 1, 5e-3) << precision;
    EXPECT_NEAR(serial.val_loss / exact.val_loss, 1, 5e-3) << precision;
    TrainRun compiled = train(1, "--steps 50 --compile " + precision);
    expect_contains(last_output_, "48 of 50 steps were replayed from 1 graph,");
    EXPECT_NEAR(compiled.losses[49] / exact.losses[49], 1, 5e-3) << precision;
    for (const Spread& s : kSpreads) {
      SCOPED_TRACE(precision + s.flags);
      TrainRun r = train(s.ranks, "--steps 50 " + precision + s.flags);
      ASSERT_EQ(r.losses.size(), 50u);
      EXPECT_NEAR(r.losses[0] / exact.losses[0], 1, 1e-3);
      EXPECT_NEAR(r.losses[49] / exact.losses[49], 1, 5e-3);
      EXPECT_NEAR(r.val_loss / exact.val_loss, 1, 5e-3);
    }
  }
}

TEST_F(Train, TheLossScaleIsResumed) {
  TrainRun whole = train(1, "--steps 20 --precision fp16");
  std::string folder = " --checkpoint " + (folder_ / "half") + " ";
  train(1, "--steps 10 --precision fp16" + folder);
  TrainRun rest = train(1, "--steps 20 --precision fp16 --resume" + folder);
  EXPECT_EQ(rest.losses, whole.losses);
  EXPECT_EQ(rest.hash, whole.hash);
  Outcome o = run(bin("tckpt") + " inspect " + (folder_ / "half"));
  expect_contains(o.output, "scaler.scale");
  expect_contains(o.output, "scaler.good_steps");
}

TEST_F(Train, SgdDecaysWeightsOnlyWhereAsked) {
  const std::string sgd = "--steps 3 --optimizer sgd --lr 0.1";
  const std::string hash = train(1, sgd).hash;
  EXPECT_EQ(hash, train(1, sgd + " --weight-decay 0").hash);
  EXPECT_NE(hash, train(1, sgd + " --weight-decay 0.1").hash);
}

TEST_F(Train, AnMlpLearnsFromSamples) {
  Outcome o = run(bin("train") + " --model mlp --steps 1");
  EXPECT_EQ(o.status, 0) << o.output;
  expect_contains(o.output, "parameters, 1 rank, 1 step of 12 samples");
}

/// An MLP on random samples.
class TrainMlp : public Train {
 protected:
  std::string task() const override { return "--model mlp --set in=20"; }
  std::string shape() const override { return "--set layers=3 --set hidden=24"; }
};

TEST_F(TrainMlp, EveryStrategyEqualsSerial) {
  TrainRun serial = train(1, "--steps 50 --set dropout=0.1");
  ASSERT_EQ(serial.losses.size(), 50u);
  std::vector<Spread> spreads(std::begin(kSpreads), std::end(kSpreads));
  spreads.push_back({4, "--strategy pp --accumulate 2"});  // a linear layer each
  for (const Spread& s : spreads) {
    SCOPED_TRACE(s.flags);
    TrainRun r = train(s.ranks, std::string("--steps 50 --set dropout=0.1 ") + s.flags);
    ASSERT_EQ(r.losses.size(), 50u);
    EXPECT_NEAR(r.losses[0] / serial.losses[0], 1, 1e-6);
    EXPECT_NEAR(r.losses[49] / serial.losses[49], 1, 1e-3);
  }
}

TEST_F(TrainMlp, CompiledEqualsEager) {
  const Spread spreads[] = {{2, "--accumulate 2"},
                            {2, "--strategy fsdp"},
                            {4, "--strategy fsdp+tp --mesh dp=2,tp=2"},
                            {4, "--strategy hsdp --mesh replicate=2,shard=2"}};
  for (const Spread& s : spreads) {
    const std::string flags = std::string("--steps 8 --set dropout=0.1 ") + s.flags;
    const TrainRun eager = train(s.ranks, flags), compiled = train(s.ranks, flags + " --compile");
    ASSERT_EQ(compiled.losses.size(), 8u) << flags;
    EXPECT_NEAR(compiled.losses[0] / eager.losses[0], 1, 1e-6) << flags;
    EXPECT_NEAR(compiled.losses[7] / eager.losses[7], 1, 1e-5) << flags;
    expect_contains(last_output_, "steps were replayed");
  }
}

// The error names the module and the op, whichever rank finds them and however the step ran.
TEST_F(Train, ANaNIsTracedToItsOp) {
  const char* spreads[] = {"", "--compile", "--clip-norm 0", "--strategy fsdp",
                           "--strategy pp --accumulate 2"};
  for (std::string spread : spreads) {
    int ranks = spread.starts_with("--strategy") ? 2 : 1;
    // After one update of that size nothing is finite any more.
    Outcome o = run(bin("tlaunch") + " --nproc " + std::to_string(ranks) + " " + bin("train") +
                    " --data " + data() +
                    " --batch-size 8 --seq-len 16 --set layers=2 --set dim=32 --set heads=2 "
                    "--steps 20 --weight-decay 0 --lr 1e30 " +
                    spread);
    EXPECT_NE(o.status, 0) << spread;
    expect_contains(o.output, "train: step 2: the ");
    expect_contains(o.output, "on rank ");
    expect_contains(o.output, "ward) made the first ");
    expect_contains(o.output, spread == "--clip-norm 0" ? "Lower --lr or give --clip-norm, or"
                                                        : "Lower --lr or --clip-norm, or");
    EXPECT_EQ(o.output.find("in no module"), std::string::npos) << o.output;
  }
}

// Only the rank that holds the weight is asked, not those that it is sent to, and the error names
// the parameter, not the module during which it was gathered.
TEST_F(Train, ANaNInAWeightIsTracedToTheWeight) {
  const std::string sound = folder_ / "sound.safetensors", broken = folder_ / "broken.safetensors",
                    weight = "h.1.mlp.c_fc.weight";
  train(1, "--steps 1 --save " + sound);
  std::vector<NamedTensor> tensors = io::load_safetensors(sound);
  for (NamedTensor& t : tensors)
    if (t.name == weight)
      t.tensor.data<float>()[t.tensor.numel() - 1] = std::numeric_limits<float>::quiet_NaN();
  io::Metadata metadata = io::SafetensorsFile::open(sound).metadata();
  metadata.erase(io::kHashKey);
  io::save_safetensors(broken, tensors, metadata);
  const std::pair<const char*, std::string> spreads[] = {
      {"ddp", "on rank 0, a NaN that no op of this rank made was an operand of"},
      {"fsdp", "on rank 1, a NaN that no op of this rank made was an operand of all_gather"}};
  for (const auto& [strategy, story] : spreads) {
    Outcome o = run(bin("tlaunch") + " --nproc 2 " + bin("train") + " " + task() +
                    " --batch-size 8 --seq-len 16 --set layers=2 --set dim=32 --set heads=2 "
                    "--steps 2 --strategy " +
                    strategy + " --weights " + broken);
    EXPECT_NE(o.status, 0);
    expect_contains(o.output, "train: step 1: the ");
    expect_contains(o.output, story);
    expect_contains(o.output, strategy == std::string("fsdp") ? " in " + weight + " (forward)"
                                                              : " in h.1.mlp.c_fc (forward)");
  }
}

TEST_F(Train, CutModelsAreSavedAndSampledWhole) {
  std::string file = (folder_ / "model.safetensors");
  Outcome o =
      run(bin("tlaunch") + " --nproc 4 " + bin("train") + " --data " + data() +
          " --batch-size 8 --seq-len 16 --set layers=2 --set dim=32 --set heads=2 --steps 5 "
          "--strategy fsdp+tp --mesh dp=2,tp=2 --sample 40 --save " +
          file);
  EXPECT_EQ(o.status, 0) << o.output;
  EXPECT_NE(o.output.find("sample:"), std::string::npos) << o.output;
  Outcome again = run(bin("tlaunch") + " --nproc 2 " + bin("train") + " --weights " + file +
                      " --steps 0 --strategy fsdp");
  Outcome plain = run(bin("train") + " --weights " + file + " --steps 0");
  EXPECT_EQ(again.status, 0) << again.output;
  auto hash = [](const std::string& text) {
    size_t at = text.find(", parameters ");
    return at == text.npos ? "none in " + text : text.substr(at, 45);
  };
  EXPECT_EQ(hash(again.output), hash(plain.output));
}

TEST_F(Train, DropoutChangesTheRun) {
  EXPECT_NE(train(1, "--steps 3 --deterministic --set dropout=0.2").hash,
            train(1, "--steps 3 --deterministic").hash);
}

TEST_F(Train, SavedWeightsAreLoadedAndSampled) {
  std::string file = (folder_ / "model.safetensors");
  TrainRun saved = train(1, "--steps 5 --save " + file);
  Outcome o = run(bin("train") + " --weights " + file + " --steps 0 --sample 40");
  EXPECT_EQ(o.status, 0) << o.output;
  EXPECT_NE(o.output.find(saved.hash), std::string::npos) << o.output;
  EXPECT_NE(o.output.find("sample:"), std::string::npos) << o.output;
}

TEST_F(Train, FoldersOfHuggingFaceAreReadAndWritten) {
  const char* source = std::getenv("TESSERA_SOURCE");
  std::string folder = std::string(source ? source : ".") + "/tests/golden/hugging_face/gpt2";
  const std::string saved = folder_ / "saved/";
  for (std::string flags : {"--steps 0", "--steps 2 --batch-size 2"}) {
    Outcome o =
        run(bin("train") + " --model gpt2 --weights " + folder + " --save " + saved + " " + flags);
    ASSERT_EQ(o.status, 0) << o.output;
    // What was saved is what the next run begins with.
    Outcome next = run(bin("train") + " --model gpt2 --steps 0 --weights " + saved);
    ASSERT_EQ(next.status, 0) << next.output;
    size_t at = o.output.find("parameters ", o.output.find("done:"));
    EXPECT_NE(next.output.find(o.output.substr(at, 43)), std::string::npos) << next.output;
  }
}

TEST_F(Train, ModelsThatCannotBeCutAreRefusedByName) {
  const std::pair<std::string, std::string> cases[] = {
      {"--strategy tp --set heads=1", "1 heads cannot be cut over tp=2; give --set heads=2"},
      {"--strategy pp --set layers=1",
       "1 layers cannot be cut into pp=2 stages; give --set layers=2"},
  };
  for (const auto& [flags, expected] : cases) {
    const Outcome o = run(bin("tlaunch") + " --nproc 2 " + bin("train") + " --steps 1 --data " +
                          data() + " --seq-len 16 --set dim=32 " + flags);
    EXPECT_NE(o.status, 0) << flags;
    expect_contains(o.output, expected);
  }
  const std::string two = bin("tlaunch") + " --nproc 2 " + bin("train") + " --strategy pp ";
  expect_contains(run(two + "--model bert-mini --set layers=1 --steps 1").output,
                  "1 layers cannot be cut into pp=2 stages; give --set layers=2");
  expect_contains(run(two + "--model mlp --set layers=0 --steps 1").output,
                  "1 linear layers cannot be cut into pp=2 stages; give --set layers=1");
  expect_contains(run(two + "--deterministic --steps 1").output,
                  "--deterministic with --strategy pp: stages add up micro-batches as they come");
}

TEST_F(Train, RandomDataAreCalledThat) {
  expect_contains(run(bin("train") + " --seq-len 16 --set layers=1 --set dim=32 --steps 1").output,
                  "1 step of 12 sequences of random values (no --data)");
}

TEST_F(Train, WhatWasReadIsTold) {
  const std::string ids =
      folder_.write("ids.bin", std::string("\1\0\2\0", 4) + std::string(2000, '\0'));
  const std::string flags = " --seq-len 16 --set layers=1 --set dim=32 --steps 1";
  expect_contains(run(bin("train") + flags + " --data tokens:" + ids).output,
                  "tokens:" + ids + ": 901 tokens train, 101 validate, a vocabulary of 3\n");
  const std::string text = folder_.write("abc.txt", std::string(700, 'a') + std::string(300, 'b'));
  expect_contains(run(bin("train") + flags + " --data text:" + text).output,
                  "text:" + text + ": 900 tokens train, 100 validate, a vocabulary of 2\n");
  folder_.write("folder/a.txt", std::string(1000, 'a'));
  folder_.write("folder/b.txt", "one byte of Latin-1: \xE9");
  expect_contains(run(bin("train") + flags + " --data text:" + (folder_ / "folder")).output,
                  "folder: left out 1 file without UTF-8 text, '" + (folder_ / "folder/b.txt"));
}

TEST_F(Train, GarbageInTheEnvironmentIsNamed) {
  for (const char* variable : {"TESSERA_COMPILE_STREAM", "TESSERA_COMPILE_MEMORY"}) {
    const Outcome o = run(fmt::format("{}=x {} --compile --set layers=1 --set dim=32 --steps 3",
                                      variable, bin("train")));
    EXPECT_EQ(o.status, 1) << o.output;
    expect_contains(o.output, fmt::format("\n{}=\"x\": expected an integer", variable));
  }
  for (const char* env :
       {"RANK=x WORLD_SIZE=2", "RANK=2 WORLD_SIZE=2", "WORLD_SIZE=0", "RANK=-1 WORLD_SIZE=2"}) {
    Outcome o = run(std::string("env ") + env + " " + bin("train") + " --steps 1");
    EXPECT_NE(o.status, 0) << env;
    EXPECT_TRUE(o.output.find("RANK") != std::string::npos ||
                o.output.find("WORLD_SIZE") != std::string::npos)
        << o.output;
  }
}

}  // namespace
}  // namespace tessera
