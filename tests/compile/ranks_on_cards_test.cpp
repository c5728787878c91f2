// Compiled training steps of ranks that each have a card: NCCL's collectives are captured with the
// kernels, so that a step is one graph, whatever the wrapper; where the host takes part in them, a
// step is several. Loss, norm and parameters equal those of eager steps within rounding.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "collectives/loopback/run_ranks.h"
#include "compile/compile.h"
#include "core/base/deterministic.h"
#include "core/dispatch/copy.h"
#include "core/dispatch/default_device.h"
#include "core/ops/compose.h"
#include "tests/compile/numbers.h"
#include "tests/compile/wrapped_steps.h"
#include "tests/support/on_card.h"

namespace tessera {
namespace {

using test::wrapped::Case;
using testing::Eq;
using testing::Gt;

class RanksOnCards : public test::OnCard {
 protected:
  // Compares compiled steps with eager ones; `graphs`: those that a compiled step launches.
  void compare(const Case& c, const testing::Matcher<int>& graphs, bool deterministic = false,
               compiler::CompileMode mode = compiler::CompileMode::kDefault) {
    if (runtime_of(card_).count() < c.ranks) GTEST_SKIP() << c.ranks << " cards are needed";
    run_ranks(c.ranks, [&](ProcessGroup& group) {
      const DeviceScope scope({card_.kind, int8_t(group.rank())});
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
TEST_F(RanksOnCards, StagedReductionsDivideAStep) {
  compare(test::wrapped::ddp({.bucket_bytes = 1024}), Gt(1), /*deterministic=*/true);
}

}  // namespace
}  // namespace tessera
