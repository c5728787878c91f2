#include <gtest/gtest.h>

#include "collectives/loopback/run_ranks.h"
#include "compile/compile.h"
#include "core/core.h"
#include "dtensor/dtensor.h"

using namespace tessera;

Tensor rms(const Tensor& x, double eps);

namespace {

constexpr double kEps = 1e-2;
Tensor composed(const Tensor& x) { return sqrt(mean(square(x), {-1}) + kEps); }
Tensor fused(const Tensor& x) { return rms(x, kEps); }

TEST(FusedReduction, HasTheValuesAndDerivativesOfWhatItIsMadeOf) {
  for (const DType dtype : {kF32, kF64}) {
    const Tensor x = randn({3, 1000, 7}, {.dtype = dtype});
    for (const Tensor& t : {x, transpose(x, 0, 2), select(x, 1, 4)}) {
      EXPECT_TRUE(allclose(fused(t), composed(t), 1e-6));
      const auto loss = [](auto f) { return [f](const Tensor& a) { return sum(square(f(a))); }; };
      EXPECT_TRUE(allclose(grad(loss(fused))(t), grad(loss(composed))(t), 1e-5));
    }
  }
  const Tensor x = randn({4, 5}, {.dtype = kF64});
  const auto twice = [](auto f) {
    return grad([f](const Tensor& a) {
      return sum(square(grad([f](const Tensor& b) { return sum(f(b)); })(a)));
    });
  };
  EXPECT_TRUE(allclose(twice(fused)(x), twice(composed)(x), 1e-9));
  EXPECT_THROW(fused(zeros({3, 0})), ShapeError);
  EXPECT_THROW(fused(zeros({3}, {.dtype = kI64})), UserError);
}

TEST(FusedReduction, RowsAreSplitOverRanksAndBatched) {
  run_ranks(2, [](ProcessGroup& group) {
    const DeviceMesh mesh = init_device_mesh({{"dp", 2}}, Ref<ProcessGroup>(&group));
    manual_seed(1);
    const Tensor x = randn({6, 5});
    const Tensor y = fused(distribute(x, mesh, {Shard(0)}));
    EXPECT_TRUE(layout_of(y) == Layout{Shard(0)});
    EXPECT_TRUE(equal(full_tensor(y), fused(x)));
    EXPECT_THROW(fused(distribute(x, mesh, {Shard(1)})), UserError);  // a row is whole
  });
  const Tensor x = randn({4, 3, 5});
  EXPECT_TRUE(equal(vmap(fused)(x), fused(x)));
}

TEST(FusedReduction, IsPartOfACompiledStep) {
  const auto eager = [](const Tensor& x) { return x / unsqueeze(fused(x * 2.0), -1); };
  auto step = compile(eager, {.name = "rms"});
  for (int i = 0; i < 6; ++i) {
    const Tensor x = randn({16, 32});
    EXPECT_TRUE(allclose(step(x), eager(x)));
  }
  EXPECT_GT(step.report().replays, 0) << step.report().why_not;
  EXPECT_EQ(step.report().unoptimised, "");
}

}  // namespace
