// Function transforms in a compiled step: they are traced as the ops that they run.
#include "core/autograd/transforms.h"

#include <gtest/gtest.h>

#include "compile/compile.h"
#include "core/ops/fused.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/samples.h"
#include "core/ops/views.h"
#include "tests/compile/passes/close.h"

namespace tessera::compiler {
namespace {

using test::expect_same_bits;

Tensor values(const Shape& s, uint64_t key) { return cast(sample_values(s, -1, 1, key), kF32); }

TEST(Compile, FunctionTransformsAreOrdinaryOps) {
  auto step = [](const Tensor& w, const Tensor& x, const Tensor& key) {
    auto f = [&](const Tensor& w, const Tensor& x) {
      return sum(tanh(softmax(w * x) * dropout(x, 0.5, key)));
    };
    Tensor each =
        vmap(grad(f), {.in_dims = {std::nullopt, 0}, .randomness = Randomness::kDifferent})(w, x);
    auto smooth = [](const Tensor& w) { return sum(exp(w) * w); };
    return std::tuple(each, hessian(smooth)(w), jvp(smooth, w, w).second);
  };
  auto compiled = compile(step);
  for (uint64_t k = 0; k < 4; ++k) {
    Tensor w = values({5}, k), x = values({3, 5}, 10 + k), key = sample_integers({2}, 0, 99, k);
    auto [each, h, d] = step(w, x, key);
    auto [each2, h2, d2] = compiled(w, x, key);
    expect_same_bits(each2, each, "per-sample gradients");
    expect_same_bits(h2, h, "Hessian");
    expect_same_bits(d2, d, "forward derivative");
  }
  EXPECT_GE(compiled.report().replays, 2) << compiled.report().why_not;
}

}  // namespace
}  // namespace tessera::compiler
