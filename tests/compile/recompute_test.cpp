// Blocks that backward computes again, in compiled steps: the bits are those of compiled steps
// without.
#include "core/autograd/recompute.h"

#include <gtest/gtest.h>

#include "compile/compile.h"
#include "core/autograd/autograd.h"
#include "core/nn/nn.h"
#include "core/ops/fused.h"
#include "core/ops/pointwise.h"
#include "core/ops/products.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/views.h"
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

// A recipe of a value that is gone keeps what the function was given, which is no use of it.
TEST(Compile, StepsOfRecomputedFunctionsAreReplayed) {
  const Tensor w = sample_values({8, 8}, -1, 1, 1).requires_grad_();
  using Function = Tensor (*)(const Tensor&);
  for (Function f : {Function([](const Tensor& x) { return gelu(x) * x; }),
                     Function([](const Tensor& x) { return dropout(x, 0.1) * 2.0; }),
                     Function([](const Tensor& x) {
                       const Tensor q = (x * 1.5).reshape({1, 2, 4, 8});
                       return scaled_dot_product_attention(q, q, q).reshape({8, 8});
                     })}) {
    auto step = compile([&](const Tensor& x) {
      Tensor y = sum(recompute(f, matmul(x, w)));
      return grad({&y, 1}, {&w, 1})[0];
    });
    for (int k = 0; k < 3; ++k) step(sample_values({8, 8}, -1, 1, 2));
    EXPECT_EQ(step.report().replays, 1) << step.report().why_not;
  }
}

}  // namespace
}  // namespace tessera::compiler
