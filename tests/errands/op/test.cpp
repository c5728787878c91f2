#include <gtest/gtest.h>

#include <algorithm>

#include "collectives/loopback/run_ranks.h"
#include "compile/compile.h"
#include "core/autograd/batching.h"
#include "core/core.h"
#include "dtensor/dtensor.h"

using namespace tessera;

Tensor squareplus(const Tensor& x);

namespace {

Tensor total(const Tensor& x) { return sum(squareplus(x)); }

TEST(Op, HasItsValuesAndTwoDerivatives) {
  const Tensor x = from_values<double>({-1.5, 0, 1.5}, {3});
  EXPECT_TRUE(equal(squareplus(x), from_values<double>({0.5, 1, 2}, {3})));
  const auto slope = grad(total);
  EXPECT_TRUE(allclose(slope(x), from_values<double>({0.2, 0.5, 0.8}, {3}), 1e-14));
  const Tensor curvature = grad([&](const Tensor& t) { return sum(slope(t)); })(x);
  EXPECT_TRUE(allclose(curvature, from_values<double>({0.128, 0.25, 0.128}, {3}), 1e-14));
}

TEST(Op, IsShardedByItsLoops) {
  run_ranks(2, [](ProcessGroup& group) {
    const DeviceMesh mesh = init_device_mesh({{"dp", 2}}, Ref<ProcessGroup>(&group));
    manual_seed(1);
    const Tensor x = randn({6, 5});
    const Tensor y = squareplus(distribute(x, mesh, {Shard(1)}));
    EXPECT_TRUE(layout_of(y) == Layout{Shard(1)});
    EXPECT_TRUE(equal(full_tensor(y), squareplus(x)));
    const auto cut = [&](const Tensor& t) {
      return full_tensor(total(distribute(t, mesh, {Shard(0)})));
    };
    EXPECT_TRUE(equal(grad(cut)(x), grad(total)(x)));
  });
}

TEST(Op, RunsOnABatchAtOnce) {
  const Tensor x = randn({4, 3, 5});
  EXPECT_TRUE(equal(vmap(squareplus)(x), squareplus(x)));
  EXPECT_TRUE(equal(vmap(grad(total))(x), grad(total)(x)));
  const std::vector<std::string> slow = ops_batched_one_by_one();
  EXPECT_EQ(std::count(slow.begin(), slow.end(), "squareplus"), 0);
}

TEST(Op, ComputesInTheDtypeThatAutocastGivesIt) {
  const Tensor x = randn({4, 8}), w = randn({8, 8});
  Autocast scope(kBF16);
  const Tensor h = matmul(x, w);
  ASSERT_EQ(h.dtype(), kBF16);
  EXPECT_EQ(squareplus(h).dtype(), kBF16);
  EXPECT_EQ(squareplus(x).dtype(), kF32);
}

TEST(Op, IsPartOfACompiledStep) {
  const auto eager = [](const Tensor& x) { return grad(total)(x * 2.0) + squareplus(x); };
  auto step = compile(eager, {.name = "squareplus"});
  for (int i = 0; i < 6; ++i) {
    const Tensor x = randn({16, 32});
    EXPECT_TRUE(allclose(step(x), eager(x)));
  }
  EXPECT_GT(step.report().replays, 0) << step.report().why_not;
  EXPECT_EQ(step.report().unoptimised, "");
}

}  // namespace
