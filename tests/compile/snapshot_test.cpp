// A save of what a compiled step trains has the state at the call, though the next replay
// overwrites it.
#include "compile/compile.h"
#include "tests/parallel/checkpoint/training.h"
#include "tests/support/temp_folder.h"

namespace tessera::checkpoint {
namespace {

class CompiledSave : public testing::TestWithParam<size_t> {};  // staging_bytes
INSTANTIATE_TEST_SUITE_P(StagingBytes, CompiledSave, testing::Values(0, 2 << 20));

TEST_P(CompiledSave, IsTheStateAtTheCall) {
  TempFolder dir;
  Training run;
  Checkpointer saver(dir / "c", nullptr, {.staging_bytes = GetParam()});
  auto step = compile([&](const Tensor& x, const Tensor& y) {
    Tensor loss = nn::cross_entropy((*run.model)(x), y);
    run.optimizer->zero_grad();
    loss.backward();
    run.optimizer->step();
    return loss.detach();
  });
  std::vector<Values> expected;
  for (int64_t n = 0; n < 8; ++n) {
    step(randn({16, 96}), randint(0, 8, {16}));
    expected.push_back(values_of(run.state()));
    saver.save(n, run.state());
  }
  saver.wait();
  for (int64_t n = 0; n < 8; ++n)
    expect_saved(saver.folder() + "/" + step_name(n), expected[size_t(n)]);
}

}  // namespace
}  // namespace tessera::checkpoint
