// Batch-norm over ranks in compiled steps.
#include "compile/compile.h"
#include "tests/parallel/small_net.h"

namespace tessera {
namespace {

Step compiled(Step step) {
  auto fast = std::make_shared<compiler::Compiled<Step>>(compile(std::move(step)));
  return [fast](const Tensor& a, const Tensor& b) { return (*fast)(a, b); };
}

TEST(CompiledSyncBatchNorm, UnderDdpAndFullySharded) {
  for (int ranks : {2, 3})
    expect_near(train(ranks, under_ddp(), compiled), train(ranks, under_ddp()), 2e-6, "ddp");
  expect_near(train(2, fully_sharded(), compiled), train(1, {}), 5e-6, "fully sharded");
}

// A step compiled before the conversion is not replayed after it.
TEST(CompiledSyncBatchNorm, ConvertedAfterCompilation) {
  run_ranks(2, [&](ProcessGroup& group) {
    auto norm = nn::batch_norm1d({.channels = 3});
    auto step = compile([&](const Tensor& x) {
      NoGrad off;
      return (*norm)(x);
    });
    const Tensor x = narrow(draw({8, 3}, 3, kF32), 0, 4 * group.rank(), 4).clone();
    for (int i = 0; i < 3; ++i) step(x);
    const Tensor alone = step(x).clone();
    nn::convert_sync_batch_norm(*norm);
    NoGrad off;
    const Tensor want = (*norm)(x);
    EXPECT_GT(apart(want, alone), 1e-3);
    for (int i = 0; i < 3; ++i) EXPECT_LE(apart(step(x), want), 1e-6);
  });
}

}  // namespace
}  // namespace tessera
