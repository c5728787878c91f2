// Calls of different sizes by turns on a card: each size launches a graph of its own, in memory
// that they share.
#include <gtest/gtest.h>

#include <thread>

#include "collectives/loopback/run_ranks.h"
#include "collectives/ops.h"
#include "compile/compile.h"
#include "core/core.h"
#include "core/dispatch/default_device.h"
#include "tests/compile/training.h"
#include "tests/support/on_card.h"

namespace tessera::test {
namespace {

using compiler::CompileMode;

class SizesOnCard : public OnCard {
 protected:
  void SetUp() override {
    OnCard::SetUp();
    if (!IsSkipped()) scope_.emplace(card_);
  }
  Tensor drawn(int64_t n, int64_t key) {
    return randn({n, 24}, {.device = kCPU}, from_values<int64_t>({key, 1}, {2})).to(card_);
  }
  static Tensor plain(const Tensor& x) {
    const Tensor g = softmax(matmul(x, transpose(x, 0, 1)), 1);
    return matmul(matmul(g, g), gelu(x) * 2.0);
  }
  static void expect_close(const Tensor& a, const Tensor& b) {
    EXPECT_TRUE(allclose(a.cpu().to(kF64), b.cpu().to(kF64), 1e-5, 1e-5));
  }
  // Compiles `plain` for numbers of rows from 16 to 128, all to the same steps.
  auto compiled() {
    auto f = compile(plain, {.mode = CompileMode::kReduceOverhead});
    for (int64_t n : {16, 128}) f(drawn(n, n));
    return f;
  }
  // Calls `body` on two ranks, each with a card, with its number and the world.
  template <class Body>
  void on_two(const Body& body) {
    if (cards() < 2) GTEST_SKIP() << "2 cards are needed";
    run_ranks(2, [&](ProcessGroup& group) {
      const DeviceScope scope(card(group.rank()));
      body(group.rank(), world_group());
    });
  }
  std::optional<DeviceScope> scope_;
};

TEST_F(SizesOnCard, EachTurnLaunchesAGraph) {
  auto f = compiled();
  int64_t live = 0, calls = 0;
  for (int k = 0; k < 24; ++k) {
    const int64_t n = k % 2 ? 64 : 32;
    const Tensor x = drawn(n, k);
    const int64_t blocks = runtime_of(card_).allocations(0);
    Tensor got = f(x);
    // The first run of a size goes step by step, and the second one makes the graph; the larger
    // size has moved the arena.
    EXPECT_EQ(f.report().device_graphs, k < 4 && k != 3 ? 0 : 1) << k;
    const int64_t allocated = runtime_of(card_).allocations(0) - blocks;
    expect_close(got, plain(x));
    got = {};
    const MemoryStats now = memory_stats(card_);
    const int64_t held = now.live_bytes - int64_t(x.nbytes());
    if (k == 7) live = held, calls = now.system_calls;
    if (k <= 7) continue;
    EXPECT_EQ(allocated, 0) << k;
    EXPECT_EQ(held, live) << k;
    EXPECT_EQ(now.system_calls, calls) << k;
  }
  EXPECT_EQ(f.report().recordings, 2) << f.report().why_static;
}

// A size that needs a larger arena moves it, and all sizes have their graphs made anew.
TEST_F(SizesOnCard, ALargerSize) {
  auto f = compiled();
  std::vector<int> graphs;
  const auto call = [&](int64_t n) {
    const Tensor x = drawn(n, n + int64_t(graphs.size()));
    expect_close(f(x), plain(x));
    graphs.push_back(f.report().device_graphs);
  };
  for (int64_t n : {32, 32, 32, 100, 32, 32, 100, 100, 32, 20}) call(n);
  EXPECT_EQ(graphs, (std::vector<int>{0, 1, 1, 0, 0, 1, 1, 1, 1, 0}));
}

// What moved is not kept for sizes that do not come again.
TEST_F(SizesOnCard, AnArenaThatMovedIsFreed) {
  std::vector<int64_t> held;
  for (const bool smaller_before : {false, true}) {
    auto f = compiled();
    for (int k = 0; smaller_before && k < 3; ++k) f(drawn(64, k));
    f(drawn(100, 0));
    held.push_back(memory_stats(card_).live_bytes);
  }
  EXPECT_LE(held[1], held[0] + 64);  // a few numbers
}

// Graphs of different sizes lie in the same bytes: one on another stream comes after the last.
TEST_F(SizesOnCard, SizesOnStreamsOfTheirOwn) {
  auto f = compiled();
  for (int k = 0; k < 12; ++k) {
    const Tensor x = drawn(k % 2 ? 64 : 32, k);
    std::optional<StreamScope> beside;
    if (k % 2) beside.emplace(runtime_of(card_).copy_stream(card_.index, 0));
    const Tensor got = f(x);
    beside.reset();
    EXPECT_EQ(f.report().device_graphs, k < 4 && k != 3 ? 0 : 1) << k;
    expect_close(got, plain(x));
  }
}

// Eight sizes keep their graphs; where nine take turns, each is the one that has waited longest.
TEST_F(SizesOnCard, TheEightUsedLastKeepTheirGraphs) {
  for (const int64_t sizes : {8, 9}) {
    auto f = compiled();
    for (int64_t turn = 0; turn < 4; ++turn)
      for (int64_t i = 0; i < sizes; ++i) {
        const Tensor x = drawn(100 - 3 * i, turn);
        expect_close(f(x), plain(x));
        EXPECT_EQ(f.report().device_graphs, sizes == 8 && turn > 0 ? 1 : 0) << turn << ", " << i;
      }
  }
}

// Nothing in a step waits for its collective, which is under way while another size begins.
TEST_F(SizesOnCard, Collectives) {
  on_two([&](int rank, const Ref<ProcessGroup>& world) {
    auto f = compile(
        [&](const Tensor& x) {
          all_gather(plain(x), world);
          return plain(plain(x));
        },
        {.mode = CompileMode::kReduceOverhead});
    for (int k = 0; k < 12; ++k) {
      const int64_t n = k < 2 ? 16 + 112 * k : k % 2 ? 64 : 32;
      const Tensor x = drawn(n, k).to(default_device());
      if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(10));
      expect_close(f(x), plain(plain(x)));
    }
    EXPECT_EQ(f.report().device_graphs, 2) << "the collective divides them";
  });
}

// A rank's size is known when another's is new, so ranks decide nothing together.
TEST_F(SizesOnCard, RanksHaveSizesOfTheirOwn) {
  on_two([&](int rank, const Ref<ProcessGroup>& world) {
    auto f = compile(
        [&](const Tensor& x) {
          return all_reduce(matmul(transpose(plain(x), 0, 1), x), world, ReduceOp::kSum);
        },
        {.mode = CompileMode::kReduceOverhead});
    for (int k = 0; k < 14; ++k) {
      const auto of_rank = [&](int r) {
        const int64_t n = k < 2 ? 16 + 112 * k : r ? 32 : 40 + 8 * (k % 4);
        const Tensor x = drawn(n, k).to(default_device());
        return std::pair(x, matmul(transpose(plain(x), 0, 1), x));
      };
      expect_close(f(of_rank(rank).first), of_rank(0).second + of_rank(1).second);
    }
    EXPECT_GT(f.report().device_graphs, 0);
  });
}

TEST_F(SizesOnCard, ATrainingStep) {
  Training eager(0.1), compiled(0.1);
  auto step = compile(
      [&](const Tensor& ids, const Tensor& targets) { return compiled.step(ids, targets); });
  std::vector<int> graphs;
  for (int k = 0; k < 16; ++k) {
    const int64_t rows = k % 2 ? 2 : 4;
    Generator g(uint64_t(100 + k));
    const Tensor ids = randint(0, 11, {rows, 8}, {}, g.next_key()).to(card_),
                 targets = randint(0, 11, {rows, 8}, {}, g.next_key()).to(card_);
    const Tensors want = eager.step(ids, targets), got = step(ids, targets);
    for (size_t i = 0; i < want.size(); ++i) expect_close(got[i], want[i]);
    graphs.push_back(step.report().device_graphs);
  }
  EXPECT_EQ(graphs, (std::vector<int>{0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}));
  EXPECT_GE(step.report().sizes, 2) << step.report().why_static;
}

}  // namespace
}  // namespace tessera::test
