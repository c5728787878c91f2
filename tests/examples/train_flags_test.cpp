// Bad input of the training program gives one clear line, once for all ranks.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/examples/command.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

class TrainFlags : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!std::ifstream(bin("train"))) GTEST_SKIP() << "no train in TESSERA_BIN";
    std::ofstream text(folder_ / "text.txt");
    for (int i = 0; i < 3000; ++i) text << "line " << i * i % 997 << " of a text to learn\n";
  }
  std::string data() const { return "text:" + (folder_ / "text.txt"); }
  TempFolder folder_;
};

TEST_F(TrainFlags, BadInputGetsOneClearLine) {
  std::ofstream(folder_ / "short.txt") << "too short";
  std::string short_file = (folder_ / "short.txt");
  const char* source = std::getenv("TESSERA_SOURCE");
  std::string folders = std::string(source ? source : ".") + "/tests/golden/hugging_face";
  const std::pair<std::string, std::string> cases[] = {
      {"--model gpt2 --weights " + folders + "/gpt2 --set layers=3", "only dropout may be set"},
      {"--model gpt2 --weights " + folders + "/bert", "model_type is \"bert\""},
      {"--model gpt2 --tokenizer byte --data " + data() + " --weights " + folders + "/gpt2",
       "vocabulary of 256, config.json"},
      {"--model mlp --steps 0 --save out/", "ends in .safetensors"},
      {"--steps 0 --save out/", "--set bias=true"},
      {"--steps 0 --save /nonexistent/x.safetensors", "/nonexistent is no folder"},
      {"--tensorboard " + short_file + " --steps 1", "cannot make the folder"},
      {"--model resnet50 --data text:x",
       "--model resnet50 does not learn from --data text:; give images:PATH, cifar10:DIR or "
       "idx:DIR (text: is for gpt-nano, gpt2)"},
      {"--model mlp --data text:x",
       "--model mlp does not learn from --data text:; give synthetic:"},
      {"--model gpt5", "unknown model \"gpt5\" (is gpt2 meant?); expected one of gpt-nano, gpt2,"},
      {"--model vision", "unknown model \"vision\"; expected one of gpt-nano, gpt2,"},
      {"--model bert-mini --data mlm:" + short_file, "give --tokenizer FILE"},
      {"--model bert-mini --data mlm:" + short_file + " --tokenizer " + short_file,
       "has no piece [PAD]"},
      {"--model bert-mini --data text:" + short_file, "give mlm:PATH"},
      {"--strategy spread", "unknown strategy"},
      {"--strategy fsdp+tp --steps 1", "needs --mesh dp=N,tp=N"},
      {"--strategy fsdp --mesh dp=x --steps 1", "dp=x"},
      {"--strategy fsdp --mesh tp=1 --steps 1", "expected dp=N"},
      {"--strategy fsdp --mesh dp=2 --steps 1",
       "is 2 ranks, but group world has 1; start the program with tlaunch --nproc 2, or"},
      {"--strategy pp --mesh tp=1 --steps 1", "expected pp=N or dp=N,pp=N"},
      {"--bad-images skip",
       "--bad-images is for models of images, not for --model gpt-nano; leave"},
      {"--model resnet18 --bad-images skip", "--bad-images is for --data images:"},
      {"--model resnet18 --data cifar10:x --bad-images skip", "--bad-images is for --data images:"},
      {"--model resnet18 --augment crop", "--augment is for images that are read"},
      {"--tokenizer byte", "--tokenizer is for text that is read"},
      {"--momentum 0.9", "--momentum is for --optimizer sgd, not adamw"},
      {"--model mlp --seq-len 8", "--seq-len is for language models"},
      {"--model resnet18 --tokenizer byte", "--tokenizer is for language models"},
      {"--optimizer sgd --betas 0.9,0.99", "--betas is for --optimizer adamw and lion, not sgd"},
      {"--min-lr 0.1", "--min-lr is where --schedule linear or cosine ends"},
      {"--logical-batches 8", "--logical-batches is for --deterministic"},
      {"--offload", "--offload with --strategy ddp"},
      {"--offload --strategy fsdp --device cpu", "--offload on the CPU"},
      {"--data text", "--data \"text\": expected text:PATH"},
      {"--data synthetic:" + short_file, "expected text:PATH"},
      {"--save= --steps 1", "--save: is empty"},
      {"--steps 1 --save --compile", "--save: \"--compile\" is a flag, not its value"},
      {"--steps", "--steps expects a value"},
      {"--no-such-flag", "there is no flag --no-such-flag; see"},
      {"--stpes 3", "there is no flag --stpes (is --steps meant?)"},
      {"3", "\"3\" is neither a flag nor the value of one"},
      {"--batch-size 0", "--batch-size 0"},
      {"--batch-size x", "--batch-size: \"x\" is no whole number"},
      {"--lr abc", "--lr: \"abc\" is no number"},
      {"--lr inf", "--lr: inf is not finite"},
      {"--lr 1e400", "--lr: 1e400 is out of range"},
      {"--weight-decay nan", "--weight-decay: nan is not finite"},
      {"--data ''", "--data: is empty"},
      {"--save '' --steps 1", "--save: is empty"},
      {"--weights '' --steps 1", "--weights: is empty"},
      {"--set vocab=10 --steps 1 --data " + data(), "--set vocab=10, but the vocabulary"},
      {"--batch-size 7 --accumulate 2", "--batch-size 7"},
      {"--accumulate 4611686018427387904", "--accumulate 4611686018427387904: expected 1 to"},
      {"--data text:/no/such/file", "/no/such/file"},
      {"--data text:" + short_file, "8 tokens"},
      {"--data pictures:here", "pictures:here"},
      {"--set colour=red --steps 1", "colour"},
      {"--betas 0.9", "--betas"},
      {"--metrics /no/such/folder/m.jsonl --steps 1", "/no/such/folder"},
      {"--deterministic --logical-batches 3 --batch-size 12", "powers of two"},
      {"--sample 10 --steps 1", "--sample"},
      {"--schedule spiral --steps 5", "spiral"},
      {"--precision fp16 --deterministic --steps 1", "Use bf16 or fp32"},
      {"--compile --compile-mode fast --steps 1",
       "expected default, reduce-overhead or max-autotune"},
      {"--fp8-powers-of-two", "--fp8-powers-of-two is of --fp8"},
      {"--fp8-gather --strategy fsdp", "--fp8-gather with --fp8 none"},
      {"--fp8 current --fp8-gather", "--strategy ddp"},
      {"--precision fp8 --steps 1", "expected fp32, tf32, bf16 or fp16"},
      {"--precision bf16 --exact-contraction --steps 1", "--exact-contraction"},
      {"--epochs inf", "--epochs: inf is not finite"},
      {"--epochs 1e300 --data " + data(), "--epochs 1e+300"},
      {"--epochs 1 --steps 3", "give one of them"},
      {"--seed 99999999999999999999999", "--seed"},
      {"--steps 99999999999999999999999", "out of range"},
      {"--clip-norm -1 --steps 1", "--clip-norm -1"},
      {"--sample -20 --steps 1", "--sample -20"},
      {"--eval-every -1 --steps 1", "--eval-every -1"},
      {"--min-lr 1 --lr 0.1 --schedule cosine --steps 1", "--min-lr 1 is above --lr 0.1"},
  };
  for (const auto& [flags, expected] : cases) {
    Outcome o = run(bin("train") + " " + flags + " </dev/null");
    EXPECT_NE(o.status, 0) << flags;
    EXPECT_NE(o.output.find(expected), std::string::npos) << flags << "\n" << o.output;
    EXPECT_EQ(std::count(o.output.begin(), o.output.end(), '\n'), 1) << flags << "\n" << o.output;
  }
}

// Numbers at the ends of what an option takes, and just beyond.
TEST_F(TrainFlags, RangesOfNumbersEndWhereTheErrorsSay) {
  struct Range {
    std::string flags;  // before the number
    std::vector<std::string> taken, refused;
    std::string error;
  };
  const std::string images = "--model resnet18 --set width=8 ";
  const Range ranges[] = {
      {"--optimizer sgd --momentum ", {"0", "0.999"}, {"-0.001", "1"}, "it is in [0, 1)"},
      {"--betas 0.9,", {"0", "0.999"}, {"-0.001", "1"}, "each is in [0, 1)"},
      {images + "--label-smoothing ", {"0", "0.999"}, {"-0.001", "1"}, "it is in [0, 1)"},
      {images + "--image-size ", {"32"}, {"-1", "16385"}, "expected 1 to 16384"},
      {"--workers ", {"1", "1024"}, {"0", "1025"}, "expected 1 to 1024"},
      {"--batch-size ", {"1"}, {"0", "1073741825"}, "expected 1 to 1073741824"},
      {"--accumulate ", {"1"}, {"0", "1073741825"}, "expected 1 to 1073741824"},
      {"--sample 0 --eval-every ", {"0", "1"}, {"-1"}, "expected at least 0"},
      {"--eval-every 0 --sample ", {"0"}, {"-1"}, "expected at least 0"},
      {"--clip-norm ", {"0", "1e9"}, {"-0.001"}, "expected 0 (no clipping) or more"},
      {"--lr ", {"0", "10"}, {"-0.001"}, "rates are not negative"},
      {"--schedule cosine --lr 0.1 --min-lr ", {"0", "0.1"}, {"0.1001"}, "schedules go down"},
      {"--schedule cosine --min-lr ", {"0"}, {"-0.001"}, "rates are not negative"},
      {"--checkpoint " + (folder_ / "run") + " --keep ", {"0", "1"}, {"-1"}, "expected at least 0"},
      {"--checkpoint " + (folder_ / "run") + " --save-every ", {"0"}, {"-1"}, "at least 0"},
  };
  for (const Range& range : ranges) {
    for (const std::string& value : range.taken) {
      std::filesystem::remove_all(folder_ / "run");
      const Outcome o = run(bin("train") + " --steps 0 " + range.flags + value);
      EXPECT_EQ(o.status, 0) << range.flags << value << "\n" << o.output;
    }
    for (const std::string& value : range.refused) {
      const Outcome o = run(bin("train") + " --steps 0 " + range.flags + value);
      EXPECT_EQ(o.status, 1) << range.flags << value << "\n" << o.output;
      expect_contains(o.output, range.error);
    }
  }
  for (const std::string flags : {"--steps -1 --epochs -0.5", "--steps -2"})
    expect_contains(run(bin("train") + " " + flags).output, "expected numbers from 0");
}

// Rank 0 prints it, or the one rank that has another command line.
TEST_F(TrainFlags, AllRanksTellOnceWhatIsWrongWithTheirCommandLine) {
  const std::string of_one_rank = " sh -c '" + bin("train") + " --batch-size $((4 - 4 * RANK))'";
  const std::pair<std::string, std::string> cases[] = {
      {bin("train") + " --stpes 3", "[rank0] train: there is no flag --stpes"},
      {bin("train") + " --batch-size 0", "[rank0] train: --batch-size 0: expected"},
      {bin("bench") + " collectives --bytes 3", "[rank0] bench collectives: there is no flag"},
      {of_one_rank, "[rank1] train: --batch-size 0: expected"}};
  for (const auto& [program, line] : cases) {
    const Outcome o = run(bin("tlaunch") + " --nproc 2 " + program);
    EXPECT_EQ(o.status, 1);
    const size_t at = o.output.find(line);
    ASSERT_NE(at, std::string::npos) << o.output;
    const std::string text = line.substr(line.find("] ") + 2);
    EXPECT_EQ(o.output.find(text), o.output.rfind(text)) << o.output;
    expect_contains(o.output, "; its last lines are above\n");
  }
}

}  // namespace
}  // namespace tessera
