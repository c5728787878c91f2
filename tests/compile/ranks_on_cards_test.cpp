// Compiled training steps of ranks that each have a card: NCCL's collectives are captured with the
// kernels, so that a step is one graph, whatever the wrapper; where the host takes part in them, a
// step is several. Loss, norm and parameters equal those of eager steps within rounding.
#include "tests/support/ranks_on_cards.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <optional>

#include "collectives/ops.h"
#include "compile/compile.h"
#include "core/backend/cuda/capture.h"
#include "core/base/deterministic.h"
#include "core/base/profile.h"
#include "core/core.h"
#include "core/dispatch/copy.h"
#include "core/dispatch/default_device.h"
#include "tests/compile/numbers.h"
#include "tests/compile/op_on_card.h"
#include "tests/compile/wrapped_steps.h"
#include "tests/cuda/counters.h"
#include "tests/support/order_on_card.h"

namespace tessera {
namespace {

using test::wrapped::Case;
using testing::Eq;
using testing::Gt;

class RanksOnCards : public test::RanksWithCards {
 protected:
  // Compares compiled steps with eager ones; `graphs`: those that a compiled step launches.
  void compare(const Case& c, const testing::Matcher<int>& graphs, bool deterministic = false,
               compiler::CompileMode mode = compiler::CompileMode::kDefault) {
    if (cards() < c.ranks) GTEST_SKIP() << c.ranks << " cards are needed";
    run_on_cards(c.ranks, [&](ProcessGroup& group) {
      const DeterministicScope bits(deterministic);
      int64_t data_rank = group.rank();
      if (!c.mesh.empty()) data_rank = init_device_mesh(c.mesh).coordinate(c.data_axis);
      test::wrapped::Training eager(c, data_rank), compiled(c, data_rank);
      auto step = compile([&](const std::vector<Tensor>& batch) { return compiled.step(batch); },
                          {.mode = mode});
      const Device card = default_device();
      int64_t memory = 0;
      for (int64_t k = 0; k < 8; ++k) {
        if (k == 6) memory = memory_stats(card).system_calls;
        const Tensors want = eager.step(eager.batch(k)), got = step(compiled.batch(k));
        for (size_t i = 0; i < want.size(); ++i) expect_close(got[i], want[i], 2e-5);
      }
      EXPECT_EQ(memory_stats(card).system_calls, memory) << "memory of the driver in a steady step";
      const auto want = eager.state(), got = compiled.state();
      for (size_t i = 0; i < want.size(); ++i) {
        SCOPED_TRACE(want[i].name);
        expect_close(got[i].tensor, want[i].tensor, 2e-3);
      }
      EXPECT_GE(step.report().replays, 3) << step.report().why_not;
      EXPECT_THAT(step.report().device_graphs, graphs);
    });
  }
  static void expect_close(const Tensor& a, const Tensor& b, double tolerance) {
    EXPECT_TRUE(allclose(a.cpu().to(kF64), b.cpu().to(kF64), tolerance, tolerance))
        << to_string(a) << "\n"
        << to_string(b);
  }
};

TEST_F(RanksOnCards, AStepOfDdpIsOneGraph) {
  compare(test::wrapped::ddp({.bucket_bytes = 1024}), Eq(1));
}
TEST_F(RanksOnCards, AStepOfFsdpIsOneGraph) { compare(test::wrapped::fsdp({}), Eq(1)); }
TEST_F(RanksOnCards, AStepWhoseParametersAreOnTheHost) {
  compare(test::wrapped::fsdp({.offload = true}), Gt(1));
}
TEST_F(RanksOnCards, AStepOfHybridShardingIsOneGraph) {
  compare(test::wrapped::fsdp({}, {{"replicate", 2}, {"shard", 2}}), Eq(1));
}
TEST_F(RanksOnCards, AStepOfTensorParallelIsOneGraph) {
  for (bool sequence : {false, true}) compare(test::wrapped::tensor_parallel(sequence), Eq(1));
}
TEST_F(RanksOnCards, AStepOfFsdpWithTensorParallelIsOneGraph) {
  compare(test::wrapped::fsdp_with_tensor_parallel(false), Eq(1));
}
TEST_F(RanksOnCards, StepsBesideEachOtherAndBesideCollectives) {
  setenv("TESSERA_COMPILE_STREAMS", "several", 1);
  for (const Case& c : {test::wrapped::fsdp({}), test::wrapped::tensor_parallel(false)})
    compare(c, Eq(1), false, compiler::CompileMode::kMaxAutotune);
  unsetenv("TESSERA_COMPILE_STREAMS");
}
// What the collectives of a compiled step read and write lies in windows, where ranks lay it alike,
// but for that of the loss, which is a result of the step.
TEST_F(RanksOnCards, CollectivesOfCompiledStepsUseWindows) {
  if (!test::order_of_driver()) GTEST_SKIP() << "a real card counts nothing";
  const auto runs = [](const char* where) {
    int64_t n = 0;
    for (const char* call : {"ncclAllGather", "ncclReduceScatter", "ncclAllReduce"})
      n += cuda::runs_so_far((std::string(call) + where).c_str());
    return n;
  };
  const auto count = [&](const Case& c) {
    std::array<int64_t, 2> counted{};  // of a rank in a step: in windows, outside
    run_on_cards(2, [&](ProcessGroup& group) {
      int64_t data_rank = group.rank();
      if (!c.mesh.empty()) data_rank = init_device_mesh(c.mesh).coordinate(c.data_axis);
      test::wrapped::Training training(c, data_rank);
      auto step = compile([&](const std::vector<Tensor>& batch) { return training.step(batch); });
      const auto run = [&](int from, int until) {
        for (int k = from; k < until; ++k) step(training.batch(k));
        runtime_of(card_).synchronize(stream_of(default_device()));
        group.barrier();
      };
      run(0, 5);
      const int64_t in = runs(" in windows"), out = runs(" outside of windows");
      group.barrier();
      run(5, 7);
      EXPECT_EQ(step.report().device_graphs, 1);
      if (group.rank() == 0)
        counted = {(runs(" in windows") - in) / 4, (runs(" outside of windows") - out) / 4};
      group.barrier();
    });
    return counted;
  };
  using Counted = std::array<int64_t, 2>;
  EXPECT_EQ(count(test::wrapped::ddp({.bucket_bytes = 1024})), (Counted{12, 1}));
  EXPECT_EQ(count(test::wrapped::fsdp({})), (Counted{79, 1}));
  // A rank has more of the vocabulary, so that its steps are in another order.
  EXPECT_EQ(count(test::wrapped::tensor_parallel(true))[0], 0);
}
// NCCL ends an aborted communicator, and what is registered there, once graphs with its calls are
// destroyed; memory is freed behind that.
TEST_F(RanksOnCards, MemoryOfAStepWhoseGroupIsAborted) {
  testing::internal::CaptureStderr();
  EXPECT_THROW(run_on_cards(2,
                            [&](ProcessGroup& group) {
                              const Ref<ProcessGroup> world = world_group();
                              auto f = compile([&](const Tensor& x) {
                                return exp(all_reduce(sin(x), world)) * 2.0;
                              });
                              const Tensor x = full({40}, 0.1, {kF32, default_device()});
                              for (int k = 0; k < 5; ++k) f(x).cpu();
                              EXPECT_EQ(f.report().device_graphs, 1);
                              group.barrier();
                              group.abort("the test ends");
                              f(x).cpu();
                            }),
               CommError);
  EXPECT_EQ(testing::internal::GetCapturedStderr().find("ncclMemFree"), std::string::npos);
}

// On another stream nothing else orders the two.
TEST_F(RanksOnCards, ACallComesBehindTheGraphBeforeIt) {
  run_on_cards(2, [&](ProcessGroup& group) {
    const Ref<ProcessGroup> world = world_group();
    const Stream beside = runtime_of(card_).copy_stream(group.rank(), 0);
    const auto on_the_other = [&](const std::function<void()>& body) {
      const StreamScope other(beside);
      body();
    };
    auto f = compile([&](const Tensor& x) { return exp(all_reduce(sin(x), world)) * 2.0; });
    const Tensor x = full({40}, 0.1, {kF32, default_device()});
    Tensor sum;
    on_the_other([&] { sum = full({40}, 1.0, {kF32, default_device()}); });
    for (int k = 0; k < 6; ++k) {
      const Tensor y = f(x);
      on_the_other([&] { group.all_reduce(sum); });
      expect_close(y, exp(sin(x) * 2.0) * 2.0, 1e-6);
    }
    EXPECT_EQ(f.report().device_graphs, 1);
    EXPECT_EQ(sum.cpu().data<float>()[39], 64);
  });
}

// Launches have to be all ranks': one that records a profile launches its graphs too.
TEST_F(RanksOnCards, AProfileOfOneRank) {
  run_on_cards(2, [&](ProcessGroup& group) {
    const Ref<ProcessGroup> world = world_group();
    auto f = compile([&](const Tensor& x) { return exp(all_reduce(sin(x), world)) * 2.0; });
    std::optional<Profiler> profile;
    for (int k = 0; k < 8; ++k) {
      if (k == 5 && group.rank() == 0) profile.emplace();
      const Tensor x = full({40}, 0.1 * k, {kF32, default_device()});
      expect_close(f(x), exp(sin(x) * 2.0) * 2.0, 1e-6);
    }
    EXPECT_EQ(f.report().device_graphs, 1);
  });
}

// Where one rank cannot capture a step, no rank launches graphs.
TEST_F(RanksOnCards, ARankThatCannotCapture) {
  test::OpOnCard::add();
  test::OpOnCard::when_run() = [](const Stream& stream) {
    TESSERA_CHECK(stream.device.index == 0 || !cuda::is_capturing(), "it cannot be captured");
  };
  run_on_cards(2, [&](ProcessGroup&) {
    const Ref<ProcessGroup> world = world_group();
    auto f = compile(
        [&](const Tensor& x) { return exp(all_reduce(test::op_on_card(sin(x)), world)) * 2.0; });
    for (int k = 0; k < 7; ++k) {
      const Tensor x = full({40}, 0.1 * k, {kF32, default_device()});
      expect_close(f(x), exp(sin(x) * 2.0) * 2.0, 1e-6);
    }
    EXPECT_GE(f.report().replays, 3);
    EXPECT_EQ(f.report().device_graphs, 0);
  });
  test::OpOnCard::when_run() = nullptr;
}

constexpr int kLayers = 5;

using Prepare = std::function<std::shared_ptr<void>(nn::Module&)>;

// What two cards are given for one replay of a step of five layers: one graph, whose nodes are in
// the order in which they were captured.
class OverlapInGraphs : public test::RanksWithCards {
 protected:
  void SetUp() override {
    RanksWithCards::SetUp();
    if (IsSkipped()) return;
    if (!test::order_of_driver()) GTEST_SKIP() << "a real card records no order";
  }
  std::vector<test::OrderOnCard> replay(const Prepare& prepare) {
    constexpr int64_t kWidth = 16;
    std::string recorded;
    run_on_cards(2, [&](ProcessGroup& g) {
      auto model = nn::sequential();
      for (int i = 0; i < kLayers; ++i)
        model->push_back(nn::linear({.in = kWidth, .out = kWidth, .bias = false}));
      model->init(1);
      const auto keep = prepare(*model);
      optim::SGD opt(model->parameters(), {.lr = 0.1});
      auto step = compile([&](const Tensor& x) {
        opt.zero_grad();
        Tensor loss = mean(square((*model)(x)));
        loss.backward();
        opt.step();
        return loss.detach();
      });
      const Tensor x = full({8, kWidth}, 0.5, {kF32, default_device()});
      for (int i = 0; i < 5; ++i) step(x).item<float>();
      g.barrier();
      if (g.rank() == 0) test::begin_order();
      g.barrier();
      step(x);
      g.barrier();
      if (g.rank() == 0) recorded = test::end_order();
      g.barrier();
      EXPECT_EQ(step.report().device_graphs, 1);
    });
    return {test::OrderOnCard(recorded, 0), test::OrderOnCard(recorded, 1)};
  }
  // How many of the calls have a kernel of the compute stream behind them, in the order of the
  // nodes, that does not wait for them.
  static int beside(const test::OrderOnCard& o, const std::vector<size_t>& calls) {
    int n = 0;
    for (const size_t call : calls) {
      EXPECT_NE(o.ops()[call].lane, o.busiest_lane());
      size_t i = call + 1;
      while (i < o.ops().size() && o.ops()[i].lane != o.busiest_lane()) ++i;
      n += i < o.ops().size() && !o.before(call, i);
    }
    return n;
  }
};

TEST_F(OverlapInGraphs, DdpReducesABucketBesideTheBackwardOfTheNext) {
  for (const auto& o : replay([](nn::Module& m) -> std::shared_ptr<void> {
         return parallel::make_reducer(m, {.bucket_bytes = 1024});
       })) {
    const std::vector<size_t> reductions = o.named("ncclAllReduce");
    EXPECT_EQ(reductions.size(), size_t(kLayers));
    EXPECT_GE(beside(o, reductions), kLayers - 1);
    EXPECT_EQ(o.waits_between_ops(), std::vector<std::string>());
  }
}

TEST_F(OverlapInGraphs, FsdpGathersALayerBesideTheOneBefore) {
  for (const auto& o : replay([](nn::Module& m) -> std::shared_ptr<void> {
         return parallel::fully_shard(m, {.groups = {"*"}});
       })) {
    EXPECT_GE(beside(o, o.named("ncclAllGather")), kLayers - 1);
    EXPECT_GE(beside(o, o.named("ncclReduceScatter")), kLayers - 1);
    EXPECT_EQ(o.waits_between_ops(), std::vector<std::string>());
  }
}

TEST_F(RanksOnCards, StagedReductionsDivideAStep) {
  compare(test::wrapped::ddp({.bucket_bytes = 1024}), Gt(1), /*deterministic=*/true);
}

}  // namespace
}  // namespace tessera
