// Blocks that backward computes again, in compiled steps: the bits are those of compiled steps
// without.
#include "core/autograd/recompute.h"

#include <gtest/gtest.h>

#include "compile/compile.h"
#include "core/nn/nn.h"
#include "tests/compile/training.h"

namespace tessera::compiler {
namespace {

using test::batch;
using test::expect_same_bits;
using test::Training;

TEST(Compile, RecomputedBlocksGiveTheSameBits) {
  for (bool selective : {false, true}) {
    Training plain(0.1), again(0.1);
    for (auto& [path, block] : nn::numbered_modules(*again.model))
      block->recompute(selective ? keeping_products() : RecomputeOptions{});
    auto compiled = [](Training& t) {
      return compile(
          [&t](const Tensor& ids, const Tensor& targets) { return t.step(ids, targets); });
    };
    auto reference = compiled(plain), step = compiled(again);
    for (int k = 0; k < 4; ++k) {
      auto [ids, targets] = batch(k);
      Tensors want = reference(ids, targets), got = step(ids, targets);
      for (size_t i = 0; i < want.size(); ++i)
        expect_same_bits(got[i], want[i], fmt::format("step {}, result {}", k, i));
    }
    EXPECT_GE(step.report().replays, 2) << step.report().why_not;
    auto a = plain.state(), b = again.state();
    for (size_t i = 0; i < a.size(); ++i) expect_same_bits(b[i].tensor, a[i].tensor, a[i].name);
  }
}

}  // namespace
}  // namespace tessera::compiler
