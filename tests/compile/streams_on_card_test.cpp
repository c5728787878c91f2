// Steps of a compiled function on several streams of a card: what depends on what is kept,
// whichever way the range is run, and the choice between one stream and several is kept on disk.
#include <gtest/gtest.h>

#include <filesystem>

#include "compile/compile.h"
#include "compile/record/trace.h"
#include "compile/run/side_streams.h"
#include "compile/run/step_ranges.h"
#include "core/core.h"
#include "core/dispatch/default_device.h"
#include "tests/compile/passes/close.h"
#include "tests/compile/passes/fuzz.h"
#include "tests/support/fuzz.h"
#include "tests/support/on_card.h"
#include "tests/support/temp_folder.h"

namespace tessera::compiler {
namespace {

class StreamsOnCard : public test::OnCard {
 protected:
  void SetUp() override {
    OnCard::SetUp();
    if (!IsSkipped()) scope_.emplace(card_);
  }
  void TearDown() override {
    unsetenv("TESSERA_COMPILE_STREAMS");
    scope_.reset();
  }
  // Three chains that need each other at the end alone.
  static Tensor chains(const Tensor& x) {
    Tensor a = x, b = x * 2.0, c = x - 1.0;
    for (int k = 0; k < 3; ++k) {
      a = softmax(matmul(a, transpose(x, 0, 1)), 1);
      b = softmax(matmul(b, transpose(x, 0, 1)), 1);
      c = softmax(matmul(c, transpose(x, 0, 1)), 1);
    }
    return matmul(a, b) + c;
  }
  Tensor drawn(int k) { return sin(reshape(arange(400).to(kF32), {20, 20}) * (0.1 + k)).to(card_); }
  static std::vector<std::string> kept(const std::string& folder) {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder))
      if (entry.path().extension() == ".streams") names.push_back(entry.path());
    return names;
  }
  std::optional<DeviceScope> scope_;
};

TEST_F(StreamsOnCard, ChainsAreOnStreamsOfTheirOwn) {
  const Tensor x = drawn(0);
  Trace trace({.inputs = {x}});
  Program p = make_program(trace.finish(Tensors{chains(x)}));
  find_ranges(p);
  ASSERT_EQ(p.ranges.size(), 1u);
  const StepStreams s = spread(p, p.ranges[0]);
  EXPECT_EQ(s.count, 3);
  int on[3] = {};
  size_t follows = 0;
  for (const StepStreams::Place& place : s.places)
    ++on[place.stream], follows += place.follows != 0;
  for (int n : on) EXPECT_GE(n, 6);  // products and softmaxes of a chain
  EXPECT_LE(follows, s.places.size() / 2);
}

TEST_F(StreamsOnCard, OneChainStaysOnOneStream) {
  const Tensor x = drawn(0);
  Trace trace({.inputs = {x}});
  Program p = make_program(trace.finish(Tensors{exp(softmax(matmul(x, x), 1))}));
  find_ranges(p);
  ASSERT_EQ(p.ranges.size(), 1u);
  EXPECT_EQ(spread(p, p.ranges[0]).count, 1);
}

TEST_F(StreamsOnCard, ResultsAreThoseOfOneStream) {
  setenv("TESSERA_COMPILE_STREAMS", "several", 1);
  auto f = compile(chains, {.mode = CompileMode::kMaxAutotune});
  for (int k = 0; k < 8; ++k)
    test::expect_close(f(drawn(k)), chains(drawn(k)), {0, 1e-6, 0, 0}, "call");
  EXPECT_EQ(f.report().device_graphs, 1);
}

TEST_F(StreamsOnCard, TheChoiceIsKeptOnDisk) {
  const TempFolder folder;
  const std::string before = std::getenv("TESSERA_COMPILE_CACHE");
  setenv("TESSERA_COMPILE_CACHE", folder.str().c_str(), 1);
  setenv("TESSERA_COMPILE_STREAMS", "timed", 1);
  for (int process = 0; process < 2; ++process) {
    auto f = compile(chains, {.mode = CompileMode::kMaxAutotune});
    for (int k = 0; k < 16; ++k) {
      test::expect_close(f(drawn(k)), chains(drawn(k)), {0, 1e-6, 0, 0}, "call");
      EXPECT_EQ(kept(folder.str()).size(), process == 0 && k < 9 ? 0u : 1u) << k;
    }
  }
  setenv("TESSERA_COMPILE_CACHE", before.c_str(), 1);
}

TEST_F(StreamsOnCard, RandomProgramsAgreeWithEagerRuns) {
  setenv("TESSERA_COMPILE_STREAMS", "several", 1);
  const test::FuzzSeeds seeds = test::fuzz_seeds(30);
  for (uint64_t seed = seeds.first; seed < seeds.end() && !HasFailure(); ++seed) {
    test::RandomStep ours(seed), eager(seed);
    for (test::RandomStep* s : {&ours, &eager})
      for (std::vector<Tensor>* list : {&s->inputs, &s->state})
        for (Tensor& t : *list) t = t.to(card_);
    auto step = compile(
        [&](const std::vector<Tensor>& in) {
          ours.inputs = in;
          return ours.run();
        },
        {.mode = CompileMode::kMaxAutotune});
    const std::vector<Tensor> like = ours.inputs;
    for (int call = 0; call < 6 && !HasFailure(); ++call) {
      std::vector<Tensor> in;
      for (const Tensor& t : like) in.push_back(sin(t * double(call + 1)));
      const Tensors got = step(in);
      eager.inputs = in;
      const std::string what = test::run_again(seed) + "call " + std::to_string(call) + " ";
      test::expect_close(got, eager.run(), {2e-5, 2e-5, 2e-2, 1e-1}, what);
      test::expect_close(ours.state, eager.state, {2e-5, 2e-5, 2e-2, 1e-1}, what + "state ");
    }
  }
}

}  // namespace
}  // namespace tessera::compiler
