// The state a run begins with and the places it writes to are checked before the first step: a save
// of another model or vocabulary, a damaged file, a place that cannot be written to or that the run
// reads.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>

#include "core/io/safetensors.h"
#include "core/ops/create.h"
#include "tests/examples/command.h"
#include "tests/support/images.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

class TrainFit : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!std::ifstream(bin("train"))) GTEST_SKIP() << "no train in TESSERA_BIN";
    std::string text;
    for (int i = 0; i < 300; ++i)
      text += "line #" + std::to_string(i * i % 97) + " of a text to learn\n";
    folder_.write("text.txt", text);
    std::ranges::replace(text, '#', 'q');  // as many characters, of other ids
    folder_.write("other.txt", text);
  }
  std::string text() const { return " --data text:" + (folder_ / "text.txt") + " "; }
  std::string other() const { return " --data text:" + (folder_ / "other.txt") + " "; }
  static Outcome train(const std::string& flags) {
    return run("OMP_NUM_THREADS=1 " + bin("train") +
               " --set layers=1 --set dim=32 --set heads=2 --seq-len 16 --batch-size 4 " + flags);
  }
  static Outcome trains(const std::string& flags) {
    Outcome o = train(flags);
    EXPECT_EQ(o.status, 0) << flags << "\n" << o.output;
    return o;
  }
  /// Expects one line of error, and no step before it.
  static void refused(const std::string& flags, const std::string& expected) {
    const Outcome o = train(flags);
    EXPECT_NE(o.status, 0) << flags << "\n" << o.output;
    EXPECT_NE(o.output.find(expected), std::string::npos)
        << flags << "\n'" << expected << "' is not in: " << o.output;
    EXPECT_EQ(std::ranges::count(o.output, '\n'), 1) << flags << "\n" << o.output;
  }
  TempFolder folder_;
};

TEST_F(TrainFit, AnotherModelIsNotResumed) {
  const std::string at = " --checkpoint " + (folder_ / "run") + " ";
  trains("--steps 2" + at + text());
  const std::string more = "--steps 3 --resume" + at;
  refused(more + text() + "--set heads=4",
          "was saved with --set heads=2, this run has heads=4; give what it was saved with");
  refused(more + text() + "--set dim=64 --set layers=2",
          "was saved with --set dim=32 --set layers=1, this run has dim=64, layers=2");
  refused(more + text() + "--optimizer sgd",
          "was saved with --optimizer adamw, this run has --optimizer sgd");
  refused(more + "--model bert-mini", "with --model gpt-nano, this run has --model bert-mini");
  refused(more + other(), "character 3 of " + (folder_ / "run/step-000000002") + " is '#', of");
  const Outcome o = trains(more + text() + "--set dropout=0.5");
  expect_contains(o.output, "note: not as it was saved: --steps 3 (was 2), --set dropout=0.5 (was");
}

TEST_F(TrainFit, EveryOptimizerTrainsAndIsResumed) {
  for (const std::string name : {"rmsprop", "adagrad", "lion"}) {
    const std::string at = " --checkpoint " + (folder_ / name) + " ";
    trains("--steps 2 --lr 0.001 --optimizer " + name + at + text());
    trains("--steps 3 --lr 0.001 --resume --optimizer " + name + at + text());
    refused("--steps 4 --resume" + at + text(), "was saved with --optimizer " + name);
  }
  refused("--optimizer adam" + text(), "expected one of sgd, adamw, rmsprop, adagrad, lion");
}

TEST_F(TrainFit, AnOptimizerOfOtherStateIsNotResumed) {
  const std::string at = " --optimizer sgd --checkpoint " + (folder_ / "run") + " ";
  trains("--steps 2 --momentum 0.5" + at + text());
  refused("--steps 3 --momentum 0 --resume" + at + text(), "--momentum 0 (was 0.5)");
}

TEST_F(TrainFit, AnotherVocabularyIsNotLoaded) {
  const std::string file = folder_ / "model.safetensors";
  trains("--steps 1 --save " + file + text());
  trains("--steps 1 --weights " + file + text());
  refused("--steps 1 --weights " + file + other(),
          "character 3 of --weights " + file + " is '#', of --data text:");
}

TEST_F(TrainFit, WordPiecesInAnotherOrderAreAnotherVocabulary) {
  std::string pieces = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nline\nof\na\n#\ntext\nto\n";
  for (int digit = 0; digit < 10; ++digit)
    pieces += std::to_string(digit) + "\n##" + std::to_string(digit) + "\n";
  folder_.write("a.txt", pieces + "learn\n##learn\n");
  folder_.write("b.txt", pieces + "##learn\nlearn\n");
  const std::string file = folder_ / "bert.safetensors", run = folder_ / "run",
                    task = "--model bert-mini --set hidden=64 --data mlm:" + (folder_ / "text.txt"),
                    a = " --tokenizer " + (folder_ / "a.txt"),
                    b = " --tokenizer " + (folder_ / "b.txt");
  trains(task + a + " --steps 1 --save " + file + " --checkpoint " + run);
  trains(task + a + " --steps 2 --weights " + file + " --checkpoint " + run + " --resume");
  refused(task + b + " --steps 1 --weights " + file,
          "the vocabulary of --weights " + file + " is that of --tokenizer " + (folder_ / "a.txt"));
  refused(task + b + " --steps 3 --resume --checkpoint " + run,
          "this run's is that of --tokenizer " + (folder_ / "b.txt"));
}

// The folder's config says what the model is.
TEST_F(TrainFit, AFolderOfAnotherVocabularyIsNotLoaded) {
  const std::string pieces = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nline\nof\na\n#\n";
  folder_.write("a.txt", pieces + "text\nto\n");
  folder_.write("b.txt", pieces + "to\ntext\n");
  const std::string bert = folder_ / "bert/",
                    task = "OMP_NUM_THREADS=1 " + bin("train") +
                           " --model bert-mini --seq-len 16 --batch-size 4 --steps 1 --data mlm:" +
                           (folder_ / "text.txt") + " --tokenizer " + (folder_ / "");
  EXPECT_EQ(run(task + "a.txt --set layers=1 --save " + bert).status, 0);
  const Outcome same = run(task + "a.txt --weights " + bert);
  EXPECT_EQ(same.status, 0) << same.output;
  const Outcome other = run(task + "b.txt --weights " + bert);
  EXPECT_EQ(other.status, 1) << other.output;
  expect_contains(other.output, "the vocabulary of --weights " + bert + " is that of --tokenizer " +
                                    (folder_ / "a.txt"));
}

// Another program saved them: nothing in the file says which model they belong to.
TEST_F(TrainFit, WeightsOfAnotherModelAreRefusedWithWhatToDo) {
  const std::string file = folder_ / "foreign.safetensors";
  io::save_safetensors(file, std::vector<NamedTensor>{{"wte.weight", ones({3, 2})}});
  const Outcome o = train("--steps 1 --weights " + file + text());
  EXPECT_EQ(o.status, 1);
  expect_contains(o.output, "1 of another shape:\n    wte.weight is [");
  EXPECT_TRUE(o.output.ends_with("the weights in " + file + " are not those of --model gpt-nano " +
                                 "with the options given; give their --model, and its options " +
                                 "with --set\n"))
      << o.output;
}

TEST_F(TrainFit, OtherClassesAreNotLoaded) {
  for (const char* cls : {"a/a", "a/b", "b/a", "b/x"})
    for (int i = 0; i < 10; ++i)
      folder_.write(std::string(cls) + "/" + std::to_string(i) + ".png", png_of(picture(16, 16)));
  const std::string file = folder_ / "net.safetensors", run_folder = folder_ / "run",
                    a = " --data images:" + (folder_ / "a"),
                    b = " --data images:" + (folder_ / "b");
  auto images = [](const std::string& flags) {
    return run("OMP_NUM_THREADS=1 " + bin("train") +
               " --model resnet18 --set width=4 --image-size 16 --batch-size 4 " + flags);
  };
  Outcome o = images("--steps 1 --save " + file + " --checkpoint " + run_folder + a);
  if (o.output.find("TESSERA_WITH_IMAGES") != std::string::npos)
    GTEST_SKIP() << "built without libjpeg, libpng and libarchive";
  EXPECT_EQ(o.status, 0) << o.output;
  o = images("--steps 1 --weights " + file + b);
  EXPECT_NE(o.status, 0);
  expect_contains(o.output, "class 2 of --weights " + file + " is 'b', of --data images:");
  o = images("--steps 2 --resume --checkpoint " + run_folder + b);
  EXPECT_NE(o.status, 0);
  expect_contains(o.output, "class 2 of " + run_folder + "/step-000000001 is 'b', of --data");
  expect_contains(o.output, "it is 'x'; give the classes");
}

TEST_F(TrainFit, ADamagedFileOfWeightsIsRefused) {
  const std::string file = folder_ / "model.safetensors";
  trains("--steps 1 --save " + file + text());
  std::string bytes = folder_.read("model.safetensors");
  bytes[bytes.size() - 10] ^= 1;
  folder_.write("model.safetensors", bytes);
  refused("--steps 1 --weights " + file + text(), "the file is damaged, take another copy");
}

TEST_F(TrainFit, PlacesThatCannotBeWrittenAreRefusedFirst) {
  std::filesystem::create_directory(folder_ / "empty");
  const std::string save = text() + "--steps 1 --save ", hf = text() + "--steps 1 --set bias=true ";
  refused(save + (folder_ / "empty"), "that is a folder; name a file in it");
  refused(save + "/proc/x.safetensors", "/proc cannot be written to");
  refused(hf + "--save /proc/x/", "/proc cannot be written to");
  refused(hf + "--save " + (folder_ / "text.txt/"), "text.txt is a file, not a folder");
  refused(text() + "--steps 1 --checkpoint /proc", "cannot create '/proc/latest'");
  trains(hf + "--save " + (folder_ / "new/folder/"));
  EXPECT_TRUE(std::filesystem::exists(folder_ / "new/folder/config.json"));
  EXPECT_TRUE(std::filesystem::is_empty(folder_ / "empty"));  // nothing is left of a trial
}

TEST_F(TrainFit, WhatIsReadIsNotOverwritten) {
  const std::string corpus = folder_ / "text.txt", before = folder_.read("text.txt"),
                    file = folder_ / "model.safetensors";
  std::filesystem::create_symlink(corpus, folder_ / "link.txt");
  refused(text() + "--steps 1 --save " + corpus, "would overwrite what --data reads");
  refused(text() + "--steps 1 --metrics " + corpus, "would overwrite what --data reads");
  refused(text() + "--steps 1 --profile " + (folder_ / "link.txt"), "what --data reads");
  EXPECT_EQ(folder_.read("text.txt"), before);
  trains(text() + "--steps 1 --save " + file);
  refused("--steps 1 --weights " + file + " --save " + file, "what --weights reads");
  refused(text() + "--steps 1 --metrics " + file + " --save " + file, "--save and --metrics are");
}

TEST_F(TrainFit, ASavedStepIsNoFolderOfSteps) {
  const std::string run = folder_ / "run";
  trains("--steps 3 --save-every 1 --checkpoint " + run + text());
  const std::string more = text() + "--steps 4 --resume --checkpoint ";
  refused(more + run + "/step-000000002", "the folder that it is in, " + run +
                                              "; to go on from this step, remove the newer ones "
                                              "there first: step-000000003");
  for (const std::string& folder : {run, run + "/step-000000002"})
    refused(text() + "--steps 0 --weights " + folder,
            "is a checkpoint; go on from it with --checkpoint and --resume, or make weights of it "
            "with tckpt consolidate " +
                folder);
  // As it says, for a newest step that is damaged.
  const std::string damaged = "run/step-000000003/rank-0000-of-0001.safetensors";
  std::string bytes = folder_.read(damaged);
  bytes[bytes.size() - 10] ^= 1;
  folder_.write(damaged, bytes);
  refused(more + run, "To go on from an older step, remove the folder of this one");
  std::filesystem::remove_all(run + "/step-000000003");
  expect_contains(trains(more + run).output, "after step 2");
}

}  // namespace
}  // namespace tessera
