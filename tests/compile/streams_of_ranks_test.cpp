// Steps with collectives on several streams of each rank's card: they compute what one stream
// computes, and ranks choose between the two together, by the times of the slowest one.
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <mutex>
#include <thread>

#include "collectives/ops.h"
#include "compile/compile.h"
#include "core/backend/cuda/capture.h"
#include "core/backend/cuda/library.h"
#include "core/core.h"
#include "core/dispatch/default_device.h"
#include "core/io/object_cache.h"
#include "tests/compile/bits.h"
#include "tests/compile/op_on_card.h"
#include "tests/compile/wrapped_steps.h"
#include "tests/support/ranks_on_cards.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using compiler::CompileMode;
using test::wrapped::Case;

// What the op op_on_card does on one card.
struct Behaviour {
  int one_ms = 0, several_ms = 0;  // it sleeps in the graph on one stream, and in that on several
  bool fails = false;              // it cannot be captured
  int captures = 0;
};
Behaviour behaviours[2];

// What the op does where it is captured: it holds up the stream.
void hold_up(const Stream& stream) {
  if (!cuda::is_capturing()) return;
  Behaviour& b = behaviours[stream.device.index];
  TESSERA_CHECK(!b.fails, "it cannot be captured");
  int& ms = b.captures++ == 0 ? b.one_ms : b.several_ms;
  cuda::driver().launch_host_function(
      static_cast<cuda::StreamHandle>(stream.handle),
      [](void* p) {
        std::this_thread::sleep_for(std::chrono::milliseconds(*static_cast<int*>(p)));
      },
      &ms);
}

class StreamsOfRanks : public test::RanksWithCards {
 protected:
  void SetUp() override {
    RanksWithCards::SetUp();
    if (IsSkipped()) return;
    test::OpOnCard::add();
    test::OpOnCard::when_run() = hold_up;
    for (Behaviour& b : behaviours) b = {};
    const char* before = std::getenv("TESSERA_COMPILE_CACHE");
    cache_before_ = before ? before : "";
  }
  void TearDown() override {
    test::OpOnCard::when_run() = nullptr;
    unsetenv("TESSERA_COMPILE_STREAMS");
    if (cache_before_.empty())
      unsetenv("TESSERA_COMPILE_CACHE");
    else
      setenv("TESSERA_COMPILE_CACHE", cache_before_.c_str(), 1);
  }

  // Choices are timed, and kept in a folder of the test's own.
  void time_streams() {
    std::filesystem::create_directories(folder_.str());
    setenv("TESSERA_COMPILE_CACHE", folder_.str().c_str(), 1);
    setenv("TESSERA_COMPILE_STREAMS", "timed", 1);
  }
  // The graphs that each call of a step launches, where ranks agree; their steps have shapes, and
  // entries on disk, of their own.
  std::vector<int> graphs(int calls = 11, bool reads = true) {
    std::vector<int> of_rank[2];
    run_on_cards(2, [&](ProcessGroup& group) {
      const int rank = group.rank();
      const Ref<ProcessGroup> world = world_group();
      const auto plain = [&](const Tensor& x) {
        const Tensor g = all_reduce(matmul(x, transpose(x, 0, 1)), world);
        Tensor a = g, b = g * 2.0;
        for (int k = 0; k < 2; ++k) a = softmax(matmul(a, g), 1), b = softmax(matmul(b, g), 1);
        return test::op_on_card(a + b);
      };
      auto f = compile(plain, {.mode = CompileMode::kMaxAutotune});
      for (int k = 0; k < calls; ++k) {
        const Tensor x = sin(full({20, 20 + rank}, 0.1 * k, {kF32, default_device()}));
        const Tensor got = f(x);
        of_rank[rank].push_back(f.report().device_graphs);
        if (!reads) continue;
        EXPECT_TRUE(allclose(got.cpu(), plain(x).cpu(), 1e-5, 1e-5)) << k;
        group.barrier();  // so that a rank's time is its own
      }
    });
    EXPECT_EQ(of_rank[0], of_rank[1]);
    return of_rank[0];
  }
  std::vector<std::string> kept() const {
    std::vector<std::string> all;
    for (const auto& entry : std::filesystem::directory_iterator(folder_.str()))
      if (entry.path().extension() == ".streams") all.push_back(entry.path().stem());
    return all;
  }
  std::string choice(const std::string& key) const {
    return std::string(disk().find(key)->object());
  }
  void set_choice(const std::string& key, const std::string& to) const {
    std::filesystem::remove(folder_.str() + "/" + key + ".streams");
    bool made = false;
    disk().find_or_make(
        key, [&](const std::string&) { return to; }, &made);
  }
  io::ObjectCache disk() const { return {folder_.str(), ".streams", "test"}; }

  const TempFolder folder_;
  std::string cache_before_;
};

// Graphs of calls that begin with a recording and a run step by step.
const std::vector<int> kTimed = {0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1};
const std::vector<int> kOne = {0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1};
const std::vector<int> kSeveral = {0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};

TEST_F(StreamsOfRanks, SeveralHaveTheBitsOfOne) {
  for (const Case& c : {test::wrapped::ddp({.bucket_bytes = 1024}), test::wrapped::fsdp({})}) {
    std::vector<std::vector<Tensor>> want(2);
    int64_t by_graphs[2] = {};
    for (const char* streams : {"one", "several"}) {
      setenv("TESSERA_COMPILE_STREAMS", streams, 1);
      run_on_cards(2, [&](ProcessGroup& group) {
        test::wrapped::Training training(c, group.rank());
        auto step = compile([&](const std::vector<Tensor>& b) { return training.step(b); },
                            {.mode = CompileMode::kMaxAutotune});
        std::vector<Tensor> got;
        int64_t graphs = 0;
        for (int64_t k = 0; k < 8; ++k) {
          for (const Tensor& t : step(training.batch(k))) got.push_back(t.cpu());
          graphs += step.report().device_graphs;
        }
        for (const NamedTensor& t : training.state()) got.push_back(t.tensor.cpu());
        std::vector<Tensor>& first = want[size_t(group.rank())];
        int64_t& of_one = by_graphs[group.rank()];
        if (first.empty())
          first = got, of_one = graphs;
        else
          EXPECT_EQ(graphs, of_one - 1);  // a run without a graph comes before the one on several
        test::expect_same_bits(got, first, streams);
      });
    }
  }
}

// Alone, rank 0 would choose several streams and rank 1 one.
TEST_F(StreamsOfRanks, TheTimesOfTheSlowestRankCount) {
  time_streams();
  for (const bool several : {false, true}) {
    behaviours[0] = {.one_ms = several ? 40 : 10};
    behaviours[1] = {.several_ms = several ? 10 : 40};
    EXPECT_EQ(graphs(), kTimed);
    ASSERT_EQ(kept().size(), 2u);
    for (const std::string& key : kept()) {
      EXPECT_EQ(choice(key), several ? "several" : "one");
      std::filesystem::remove(folder_.str() + "/" + key + ".streams");
    }
  }
}

// A rank that comes to a call before its card has ended the last one does as the others do.
TEST_F(StreamsOfRanks, RanksThatReadNothing) {
  time_streams();
  behaviours[1] = {.one_ms = 20, .several_ms = 20};
  EXPECT_EQ(graphs(11, /*reads=*/false), kTimed);
}

TEST_F(StreamsOfRanks, WhatAllRanksKeptCounts) {
  time_streams();
  for (Behaviour& b : behaviours) b.several_ms = 10;
  EXPECT_EQ(graphs(), kTimed);
  const std::vector<std::string> keys = kept();
  ASSERT_EQ(keys.size(), 2u);
  EXPECT_EQ(graphs(), kOne);
  for (const std::string& key : keys) set_choice(key, "several");
  EXPECT_EQ(graphs(), kSeveral);

  // Ranks that differ measure again, and keep what all chose.
  for (Behaviour& b : behaviours) b = {.several_ms = 10};
  set_choice(keys[0], "one");
  EXPECT_EQ(graphs(), kTimed);
  for (const std::string& key : keys) EXPECT_EQ(choice(key), "one");
  for (Behaviour& b : behaviours) b = {.several_ms = 10};
  std::filesystem::remove(folder_.str() + "/" + keys[1] + ".streams");
  EXPECT_EQ(graphs(), kTimed);
  for (const std::string& key : keys) EXPECT_EQ(choice(key), "one");
}

TEST_F(StreamsOfRanks, ARankThatCannotCaptureSeveral) {
  setenv("TESSERA_COMPILE_STREAMS", "several", 1);
  behaviours[1].fails = true;
  EXPECT_EQ(graphs(6), (std::vector<int>{0, 0, 0, 0, 0, 0}));
}

}  // namespace
}  // namespace tessera
