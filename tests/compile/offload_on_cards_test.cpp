// Compiled steps whose parameters are in memory of the host: copies from and to it are captured
// with the kernels, and the update runs on the host behind them.
#include <gtest/gtest.h>

#include "collectives/loopback/run_ranks.h"
#include "compile/compile.h"
#include "core/core.h"
#include "core/dispatch/default_device.h"
#include "examples/models/gpt.h"
#include "parallel/fsdp.h"
#include "tests/compile/bits.h"
#include "tests/support/on_card.h"

namespace tessera {
namespace {

class OffloadOnCards : public test::OnCard {
 protected:
  static Tensor tokens(int64_t first) {
    return (arange(first, first + 24, 1, {kI64, default_device()}) * 7).reshape({4, 6}) % 11;
  }
  // What a rank has computed in eight steps: losses, norms and its pieces of the parameters.
  std::vector<Tensor> train(ProcessGroup& group, bool compiled, int64_t micro_batches,
                            compiler::CompileMode mode = compiler::CompileMode::kDefault) {
    const DeviceScope scope(card(group.rank()));
    manual_seed(5);
    models::Gpt model(models::GptOptions{
        .vocab = 11, .context = 6, .layers = 2, .heads = 2, .dim = 32, .dropout = 0.1});
    model.init(3);
    auto fsdp = parallel::fully_shard(model, {.offload = true});
    optim::AdamW optimizer(model.named_parameters(), {.lr = 0.01});
    const auto update = [&](const std::vector<Tensor>& batch) {
      Tensor loss;
      for (int64_t m = 0; m < micro_batches; ++m) {
        fsdp->set_sync(m + 1 == micro_batches);
        loss = model.loss(batch[size_t(2 * m)], batch[size_t(2 * m + 1)]);
        loss.backward();
      }
      const optim::Clip clip = optim::clip_grad_norm(model.parameters(), 0.5);
      optimizer.step(clip.scale);
      optimizer.zero_grad();
      return std::pair(loss.detach(), clip.norm);
    };
    auto step = compile(update, {.mode = mode, .skip = "fuse,decompose,epilogues"});
    std::vector<Tensor> all;
    int64_t memory = 0;
    for (int64_t k = 0; k < 8; ++k) {
      std::vector<Tensor> batch;
      for (int64_t m = 0; m < 2 * micro_batches; ++m)
        batch.push_back(tokens(3 * k + m + group.rank()));
      if (k == 6) memory = memory_stats(default_device()).system_calls;
      const auto [loss, norm] = compiled ? step(batch) : update(batch);
      all.push_back(loss.cpu()), all.push_back(norm.clone());
    }
    for (const Tensor& p : model.parameters()) {
      all.push_back(to_local(p.detach()).clone());
      EXPECT_TRUE(all.back().device().is_cpu());
    }
    if (!compiled) return all;
    EXPECT_EQ(memory_stats(default_device()).system_calls, memory);
    EXPECT_GE(step.report().replays, 3) << step.report().why_not;
    EXPECT_EQ(step.report().device_graphs, 1);
    return all;
  }
};

TEST_F(OffloadOnCards, AStepHasTheBitsOfAnEagerOne) {
  for (const int ranks : {1, 2}) {
    if (cards() < ranks) GTEST_SKIP() << ranks << " cards are needed";
    run_ranks(ranks, [&](ProcessGroup& group) {
      const auto want = train(group, false, ranks), got = train(group, true, ranks);
      test::expect_same_bits(got, want, fmt::format("{} ranks", ranks));
    });
  }
}

TEST_F(OffloadOnCards, CopiesOnStreamsOfTheirOwn) {
  if (cards() < 2) GTEST_SKIP() << "2 cards are needed";
  setenv("TESSERA_COMPILE_STREAMS", "several", 1);
  run_ranks(2, [&](ProcessGroup& group) {
    const auto want = train(group, false, 1),
               got = train(group, true, 1, compiler::CompileMode::kMaxAutotune);
    test::expect_same_bits(got, want, "several streams");
  });
  unsetenv("TESSERA_COMPILE_STREAMS");
}

// The host writes what a graph reads once that has read it, and the graph reads what is there then,
// wherever it lies.
TEST_F(OffloadOnCards, StateOnTheHost) {
  const DeviceScope scope(card_);
  Allocator& pinned = runtime_of(card_).host_allocator();
  const Meta meta = Meta::contiguous({20, 20}, kF32, kCPU);
  Tensor w = empty_in(meta, pinned);
  w.fill_(0.25);
  const auto plain = [&](const Tensor& x) {
    const Tensor there = w.to(card_);
    return matmul(softmax(matmul(x, there), 1), there);
  };
  auto f = compile(plain);
  for (int k = 0; k < 12; ++k) {
    const Tensor x = sin(full({20, 20}, 0.1 * (k + 1), {kF32, card_}));
    if (k == 8) {
      const Tensor moved = empty_in(meta, pinned);
      moved.fill_(-0.5);
      w = moved;
    }
    const Tensor want = plain(x), got = f(x);
    add_(w, full({20, 20}, 0.5, {kF32, kCPU}));
    EXPECT_TRUE(allclose(got.cpu(), want.cpu(), 1e-5, 1e-5)) << k;
  }
  EXPECT_EQ(f.report().device_graphs, 1);
}

// A number that a step brings to the host and reads on the card again.
TEST_F(OffloadOnCards, ANumberThatComesBack) {
  const DeviceScope scope(card_);
  const auto plain = [](const Tensor& x) {
    const Tensor rows = softmax(matmul(x, transpose(x, 0, 1)), 1);
    const Tensor scaled = rows * sum(x).to(kCPU);
    return matmul(matmul(scaled, rows), scaled);
  };
  auto f = compile(plain);
  for (int k = 0; k < 6; ++k) {
    const Tensor x = sin(full({20, 20}, 0.1 * (k + 1), {kF32, card_}));
    EXPECT_TRUE(allclose(f(x).cpu(), plain(x).cpu(), 1e-5, 1e-5)) << k;
  }
  EXPECT_EQ(f.report().device_graphs, 2);
}

}  // namespace
}  // namespace tessera
