// Ranks with other options or other data than their peers, and replicas that differ: one error, the
// same on all ranks, printed once, before a step is taken.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>

#include "collectives/process_group.h"
#include "core/base/version.h"
#include "core/io/safetensors.h"
#include "core/ops/create.h"
#include "examples/train/option_table.h"
#include "parallel/checkpoint/checkpointer.h"
#include "parallel/checkpoint/load.h"
#include "tests/examples/command.h"
#include "tests/support/images.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

class TrainAgreement : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!std::ifstream(bin("train"))) GTEST_SKIP() << "no train in TESSERA_BIN";
    std::string text;
    for (int i = 0; i < 300; ++i) text += "line " + std::to_string(i * i % 97) + " of a text\n";
    folder_.write("text0.txt", text);
    std::swap(text[0], text[1]);  // as many characters, and the same ones
    folder_.write("text1.txt", text);
  }
  /// `flags` are for a shell: $RANK is the rank's number. All ranks train alike but for them.
  Outcome train(const std::string& flags, int ranks = 2) const {
    return run("OMP_NUM_THREADS=1 " + bin("tlaunch") + " --nproc " + std::to_string(ranks) +
               " sh -c 'exec " + bin("train") +
               " --set layers=1 --set dim=32 --set heads=2 --seq-len 16 --steps 3 " + flags + "'");
  }
  std::string text() const { return "--data text:" + (folder_ / "text0.txt") + " "; }
  /// One line that says what differs, before any step, from one rank; nothing is saved.
  void disagrees(const std::string& flags, const std::string& expected, int ranks = 2) const {
    const std::string saved = folder_ / "w.safetensors";
    const Outcome o = train(flags + " --save " + saved, ranks);
    EXPECT_EQ(o.status, 1) << flags << "\n" << o.output;
    const std::string text = "train: ranks disagree on " + expected;
    const size_t at = o.output.find(text);
    EXPECT_NE(at, o.output.npos) << flags << "\n'" << text << "' is not in: " << o.output;
    EXPECT_EQ(o.output.find("train: ranks disagree", at + 1), o.output.npos) << o.output;
    EXPECT_EQ(o.output.find("step 1"), o.output.npos) << o.output;
    EXPECT_FALSE(fs::exists(saved));
  }
  TempFolder folder_;
};

TEST_F(TrainAgreement, OptionsThatDecideNumbers) {
  const std::pair<std::string, std::string> cases[] = {
      {"--lr 0.00$((RANK+1))", "--lr: rank 0 has 0.001, rank 1 has 0.002; give all ranks the same"},
      {"--seed $((RANK+7))", "--seed: rank 0 has 7, rank 1 has 8"},
      {"--clip-norm $((RANK))", "--clip-norm: rank 0 has 0, rank 1 has 1"},
      {"--batch-size $((4+4*RANK))", "--batch-size: rank 0 has 4, rank 1 has 8"},
      {"--betas 0.9,0.9$((RANK+1))", "--betas: rank 0 has 0.9,0.91, rank 1 has 0.9,0.92"},
      {"--set dropout=0.$RANK",
       "--set: rank 0 has layers=1 dim=32 heads=2 dropout=0.0, rank 1 has"},
      {"--steps $((3+RANK)) --warmup $RANK",
       "--steps: rank 0 has 3, rank 1 has 4; and on --warmup"},
      {"--tokenizer $([ $RANK = 0 ] && echo char || echo byte)",
       "--tokenizer: rank 0 has char, rank 1 has byte"},
      {"--eval-every $RANK", "--eval-every: rank 0 has 0, rank 1 has 1"},
      {"--checkpoint " + (folder_ / "run") + "$RANK", "--checkpoint: rank 0 has "},
  };
  for (const auto& [flags, expected] : cases) disagrees(text() + flags, expected);
  disagrees(text() + "--batch-size 12 --weight-decay 0.$((RANK%2))",
            "--weight-decay: ranks 0, 2 have 0, rank 1 has 0.1;", 3);
}

TEST_F(TrainAgreement, InstructionSets) {
  const Outcome o = run(bin("tlaunch") +
                        " --nproc 2 sh -c 'export TESSERA_ISA=base; [ $RANK = 0 ] || "
                        "TESSERA_ISA=v3; exec " +
                        bin("train") + " --set layers=1 --steps 1 " + text() + "'");
  EXPECT_EQ(o.status, 1) << o.output;
  expect_contains(o.output, "train: ranks disagree on the instruction set of kernels (TESSERA_ISA");
  expect_contains(o.output, "rank 0 has base, rank 1 has v3");
}

// Rank 1 runs a copy of the program in which `from` is replaced by `to`; both have the same length.
Outcome run_with_a_changed_copy(const TempFolder& folder, const std::string& from,
                                const std::string& to, const std::string& flags) {
  std::ifstream file(bin("train"), std::ios::binary);
  std::string program(std::istreambuf_iterator<char>(file), {});
  size_t at = program.find(from);
  EXPECT_NE(at, program.npos);
  for (; at != program.npos; at = program.find(from, at)) program.replace(at, from.size(), to);
  fs::permissions(folder.write("1", program), fs::perms::owner_all);
  fs::create_symlink(fs::absolute(bin("train")), folder / "0");
  return run(bin("tlaunch") + " --nproc 2 sh -c 'exec " + (folder / "$RANK") + flags + "'");
}

TEST_F(TrainAgreement, VersionsOfTheProgram) {
  const std::string mine(version());
  std::string other = mine;
  other.back() = other.back() == '9' ? '8' : '9';
  const Outcome o =
      run_with_a_changed_copy(folder_, mine, other, " --set layers=1 --steps 1 " + text());
  EXPECT_EQ(o.status, 1) << o.output;
  expect_contains(o.output, "train: ranks disagree on the version of the program: rank 0 has " +
                                mine + ", rank 1 has " + other + ";");
}

TEST_F(TrainAgreement, BuildsOfOneVersionOfTheProgram) {
  const Outcome about = run(bin("train") + " --version");
  const size_t at = about.output.find("build: ") + 7;
  const std::string id = about.output.substr(at, about.output.find('\n', at) - at);
  ASSERT_TRUE(id.size() > 1 && id.find_first_not_of("0123456789abcdef") == id.npos) << about.output;
  std::string other_id = id, mine, other;
  other_id.back() = id.back() == '0' ? '1' : '0';
  for (size_t i = 0; i + 1 < id.size(); i += 2) {
    mine += char(std::stoi(id.substr(i, 2), nullptr, 16));
    other += char(std::stoi(other_id.substr(i, 2), nullptr, 16));
  }
  const Outcome o =
      run_with_a_changed_copy(folder_, mine, other, " --set layers=1 --steps 1 " + text());
  EXPECT_EQ(o.status, 1) << o.output;
  expect_contains(
      o.output, "train: ranks disagree on the build of the program (--version): rank 0 has " + id +
                    ", rank 1 has " + other_id + ";");
}

TEST_F(TrainAgreement, WhatIsCompiled) {
  const Outcome o = run(bin("tlaunch") +
                        " --nproc 2 sh -c '[ $RANK = 0 ] || export TESSERA_COMPILE_SKIP=fuse; "
                        "exec " +
                        bin("train") + " --set layers=1 --steps 1 " + text() + "'");
  EXPECT_EQ(o.status, 1) << o.output;
  expect_contains(o.output, "ranks disagree on TESSERA_COMPILE_SKIP: rank 0 has '', rank 1 has");
}

TEST_F(TrainAgreement, DataOfTheSameVocabulary) {
  disagrees("--data text:" + (folder_ / "text") + "$RANK.txt",
            "the data: rank 0 has 4815 tokens train, 536 validate, xxh128 ");
  std::string ids(20000, '\0');
  ids[0] = 9;
  folder_.write("0.bin", ids);
  std::swap(ids[0], ids[10000]);
  folder_.write("1.bin", ids);
  disagrees("--data tokens:" + (folder_ / "$RANK.bin"), "the data: rank 0 has 9000 tokens");
}

TEST_F(TrainAgreement, Pictures) {
  for (const std::string rank : {"0", "1"})
    for (int i = 0; i < 40; ++i)
      folder_.write(rank + "/" + std::to_string(i % 2) + "/" + std::to_string(i) + ".png",
                    png_of(picture(32, 32 + (rank == "1" && i == 17))));
  const Outcome o = run("OMP_NUM_THREADS=1 " + bin("tlaunch") + " --nproc 2 sh -c 'exec " +
                        bin("train") + " --model resnet18 --set width=8 --image-size 32 --steps 1" +
                        " --batch-size 4 --data images:" + (folder_ / "$RANK") + "'");
  EXPECT_EQ(o.status, 1);
  expect_contains(o.output, "train: ranks disagree on the data: rank 0 has 36 images");
}

TEST_F(TrainAgreement, Weights) {
  const std::string one = bin("train") + " --set layers=1 --set dim=32 --set heads=2 --steps 0 ";
  for (const std::string seed : {"0", "1"})
    ASSERT_EQ(run(one + text() + "--seed " + seed + " --save " + (folder_ / seed) + ".safetensors")
                  .status,
              0);
  for (const std::string strategy : {"ddp", "fsdp"})
    disagrees(text() + "--strategy " + strategy + " --weights " + (folder_ / "$RANK.safetensors"),
              "the weights: rank 0 has xxh128 ");
}

// A byte that differs where files are not sampled is found in the parameters.
TEST_F(TrainAgreement, ReplicasOfOtherValuesTakeNoStep) {
  const std::string model = " --set layers=3 --set dim=512 --set heads=2 --seq-len 16 ";
  const std::string file = folder_ / "0.safetensors";
  ASSERT_EQ(run(bin("train") + model + text() + "--steps 0 --save " + file).status, 0);
  io::Metadata metadata = io::SafetensorsFile::open(file).metadata();
  metadata.erase(io::kHashKey);
  io::save_safetensors(file, io::load_safetensors(file), metadata, {.store_hash = false});
  fs::copy_file(file, folder_ / "1.safetensors");
  const io::SafetensorsFile saved = io::SafetensorsFile::open(file);
  // A byte of a tensor that every rank holds whole, between two samples.
  const io::TensorInfo info = saved.info("wpe.weight");
  constexpr uint64_t kSampled = 64 << 10, kGaps = 255;
  const uint64_t last = saved.file_bytes() - kSampled;
  uint64_t at = 0;
  for (uint64_t i = 0; i < kGaps && at < info.offset; ++i)
    at = last / kGaps * i + last % kGaps * i / kGaps + kSampled + 3;
  ASSERT_LT(at, info.offset + info.bytes);
  ASSERT_GT(last / kGaps, kSampled + 1000);
  std::fstream other(folder_ / "1.safetensors", std::ios::in | std::ios::out | std::ios::binary);
  other.seekg(int64_t(at));
  const char was = char(other.get());
  other.seekp(int64_t(at));
  other.put(char(was ^ 1)).flush();

  const Outcome o =
      run("OMP_NUM_THREADS=1 " + bin("tlaunch") + " --nproc 2 sh -c 'exec " + bin("train") + model +
          text() + "--strategy tp --steps 3 --weights " + (folder_ / "$RANK.safetensors") +
          " --save " + (folder_ / "w.safetensors") + "'");
  EXPECT_EQ(o.status, 1) << o.output;
  const size_t text_at = o.output.find(
      "train: after 0 steps the ranks hold other values of what they should hold alike, "
      "model.wpe.");
  ASSERT_NE(text_at, o.output.npos) << o.output;
  EXPECT_NE(o.output.find("weight: rank 0 has xxh128 ", text_at), o.output.npos) << o.output;
  EXPECT_EQ(o.output.find("train: after", text_at + 1), o.output.npos) << o.output;
  EXPECT_EQ(o.output.find("step 1/"), o.output.npos) << o.output;
  EXPECT_FALSE(fs::exists(folder_ / "w.safetensors"));
}

// Rank 1 goes on from a save of its own, in which a moment differs.
TEST_F(TrainAgreement, MomentsThatDiffer) {
  const std::string flags = " --set layers=1 --set dim=32 --set heads=2 --seq-len 16 " + text();
  for (const char* rank : {"0", "1"}) fs::create_directory(folder_ / rank);
  const std::string saved = folder_ / "0/run", other = folder_ / "1/run";
  Outcome o = run(bin("train") + flags + "--steps 2 --checkpoint " + saved);
  ASSERT_EQ(o.status, 0) << o.output;
  {
    checkpoint::State state;
    for (const auto& t : checkpoint::read_manifest(saved + "/" + checkpoint::step_name(2)).tensors)
      state.pieces.push_back(checkpoint::whole(t.name, empty(t.shape, t.dtype)));
    const auto group = solo_group();
    state.extra = checkpoint::load(saved, state.pieces, group.get()).extra;
    const auto moment = std::ranges::find(
        state.pieces, std::string("optimizer.exp_avg_sq.wpe.weight"), &checkpoint::Piece::name);
    ASSERT_NE(moment, state.pieces.end());
    moment->values.data<float>()[7] += 1;
    checkpoint::Checkpointer(other, group.get(), {.async = false}).save(2, state);
  }
  o = run("OMP_NUM_THREADS=1 " + bin("tlaunch") + " --nproc 2 sh -c 'cd " + (folder_ / "$RANK") +
          " && exec " + fs::absolute(bin("train")).string() + flags +
          "--steps 4 --checkpoint run --resume'");
  EXPECT_EQ(o.status, 1) << o.output;
  expect_contains(o.output,
                  "train: after 2 steps the ranks hold other values of what they should hold "
                  "alike, optimizer.exp_avg_sq.wpe.weight: rank 0 has xxh128 ");
  expect_contains(o.output,
                  "they began with them: give all ranks the same --weights, the same "
                  "saved steps in --checkpoint");
  EXPECT_EQ(o.output.find("step 3/"), o.output.npos) << o.output;
}

// Copies of the data on each host, logs of its own.
TEST_F(TrainAgreement, WhatMayDiffer) {
  fs::copy(folder_ / "text0.txt", folder_ / "copy1.txt");
  fs::copy(folder_ / "text0.txt", folder_ / "copy0.txt");
  const Outcome o =
      train("--data text:" + (folder_ / "copy") + "$RANK.txt --workers $((RANK+1)) --metrics " +
            (folder_ / "m") + "$RANK.jsonl --save " + (folder_ / "w") + "$RANK.safetensors");
  EXPECT_EQ(o.status, 0) << o.output;
  expect_contains(o.output, "ranks agreed on options and data, and on what they hold alike (");
}

TEST_F(TrainAgreement, ReplicasAgreeUnderEveryStrategy) {
  const std::pair<std::string, int> all[] = {
      {"ddp", 2},
      {"fsdp", 2},
      {"tp --mesh tp=2", 2},
      {"pp --mesh pp=2 --set layers=2 --accumulate 2", 2},
      {"hsdp --mesh replicate=2,shard=2", 4},
      {"fsdp+tp --mesh dp=2,tp=2", 4},
      {"hsdp+tp --mesh replicate=2,shard=1,tp=2", 4},
      {"pp --mesh dp=2,pp=2 --set layers=2 --accumulate 2", 4}};
  for (const auto& [strategy, ranks] : all)
    for (const std::string more : {" --set dropout=0.1", " --compile", " --precision fp16",
                                   " --optimizer sgd --momentum 0.9"}) {
      if (!more.starts_with(" --set") && strategy != "ddp" && !strategy.starts_with("fsdp+tp"))
        continue;
      const std::string run = folder_ / "run";
      fs::remove_all(run);
      const Outcome o = train(text() + "--batch-size 8 --checkpoint " + run +
                                  " --save-every 2 --strategy " + strategy + more,
                              ranks);
      EXPECT_EQ(o.status, 0) << strategy << more << "\n" << o.output;
      expect_contains(o.output, "compared 3 times) in ");
    }
}

// Statistics of batch-norm are one set of values on all ranks.
TEST_F(TrainAgreement, RunningStatisticsAreReplicas) {
  for (const std::string more : {"--strategy ddp", "--strategy ddp --sync-batch-norm",
                                 "--strategy ddp --accumulate 2", "--strategy fsdp"}) {
    const Outcome o = run("OMP_NUM_THREADS=1 " + bin("tlaunch") + " --nproc 2 " + bin("train") +
                          " --model resnet18 --set width=8 --image-size 32 --steps 2" +
                          " --batch-size 8 " + more);
    EXPECT_EQ(o.status, 0) << more << "\n" << o.output;
    expect_contains(o.output, "compared 2 times) in ");
  }
}

// Every option has a role, and only one.
TEST_F(TrainAgreement, TheTableHasAllOptions) {
  std::set<std::string> table;
  for (const train::OptionRow& row : train::option_table())
    EXPECT_TRUE(table.insert(row.flag).second) << row.flag;
  const std::string help = run(bin("train") + " --help").output;
  std::set<std::string> flags;
  for (size_t at = help.find("\n  "); at != help.npos; at = help.find("\n  ", at + 1)) {
    size_t begin = help.find_first_not_of(" -", at + 1);
    const size_t dash = help.find("--", at);
    if (dash > help.find('\n', at + 1)) continue;
    begin = dash + 2;
    flags.insert(help.substr(begin, help.find_first_of(" ,\n", begin) - begin));
  }
  for (const char* other : {"help", "version", "devices"})
    EXPECT_EQ(flags.erase(other), 1u) << other;
  EXPECT_EQ(flags, table);
  // What a checkpoint keeps is what decides numbers, and where the data were.
  for (const std::string kept : {"lr", "seed", "steps", "data", "betas", "precision"}) {
    const auto row = std::ranges::find(train::option_table(), kept, &train::OptionRow::flag);
    EXPECT_TRUE(row->kept()) << kept;
  }
}

// The checkpoint says what the data were.
TEST_F(TrainAgreement, AResumedRunIsToldOfOtherData) {
  const std::string at = " --checkpoint " + (folder_ / "run"), data = folder_ / "text.txt";
  const std::string command = bin("train") + " --set layers=1 --set dim=32 --set heads=2" +
                              " --seq-len 16 --batch-size 4 --data text:" + data + at;
  fs::copy_file(folder_ / "text0.txt", data);
  ASSERT_EQ(run(command + " --steps 2").status, 0);
  Outcome o = run(command + " --steps 3 --resume");
  EXPECT_EQ(o.status, 0) << o.output;
  EXPECT_EQ(o.output.find("the data"), o.output.npos) << o.output;
  fs::copy_file(folder_ / "text1.txt", data, fs::copy_options::overwrite_existing);
  o = run(command + " --steps 4 --resume");
  EXPECT_EQ(o.status, 0) << o.output;
  const size_t note = o.output.find("the data: 4815 tokens train, 536 validate, xxh128 ");
  ASSERT_NE(note, o.output.npos) << o.output;
  EXPECT_NE(o.output.find("(were 4815 tokens train, 536 validate, xxh128 ", note), o.output.npos)
      << o.output;
}

}  // namespace
}  // namespace tessera
