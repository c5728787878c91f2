#include <gtest/gtest.h>

#include "collectives/loopback/run_ranks.h"
#include "compile/compile.h"
#include "core/core.h"
#include "dtensor/dtensor.h"

using namespace tessera;

std::array<Tensor, 2> median3(const Tensor& x);

namespace {

Tensor values(std::initializer_list<float> v) { return from_values<float>(v, {int64_t(v.size())}); }
Tensor total(const Tensor& x) { return sum(median3(x)[0] * arange(1, 1 + x.size(0))); }

TEST(Opaque, HasItsValuesAndItsDerivative) {
  const Tensor x = values({5, 1, 4, 9, 2, 7});
  auto [median, from] = median3(x);
  EXPECT_TRUE(equal(median, values({5, 4, 4, 4, 7, 7})));
  EXPECT_TRUE(equal(from, from_values<int64_t>({0, 2, 2, 2, 5, 5}, {6})));
  EXPECT_TRUE(equal(grad(total)(x), values({1, 0, 9, 0, 0, 11})));
  EXPECT_THROW(median3(zeros({2, 3})), ShapeError);
  EXPECT_TRUE(equal(vmap([](const Tensor& t) { return median3(t)[0]; })(stack({x, x})),
                    stack({median, median})));
}

TEST(Opaque, OperandsAreWhole) {
  run_ranks(2, [](ProcessGroup& group) {
    const DeviceMesh mesh = init_device_mesh({{"dp", 2}}, Ref<ProcessGroup>(&group));
    manual_seed(1);
    const Tensor x = randn({6});
    const Tensor y = median3(distribute(x, mesh, {Replicate()}))[0];
    EXPECT_TRUE(equal(full_tensor(y), median3(x)[0]));
    EXPECT_THROW(median3(distribute(x, mesh, {Shard(0)})), UserError);
  });
}

TEST(Opaque, IsANodeOfACompiledStep) {
  const auto eager = [](const Tensor& x) { return grad(total)(x * 2.0) + median3(x)[0]; };
  auto step = compile(eager, {.name = "median3"});
  for (int i = 0; i < 6; ++i) {
    const Tensor x = randn({16});
    EXPECT_TRUE(allclose(step(x), eager(x)));
  }
  EXPECT_GT(step.report().replays, 0) << step.report().why_not;
  EXPECT_EQ(step.report().unoptimised, "");
  EXPECT_EQ(step.report().segments, step.report().recordings) << "each is one graph";
}

}  // namespace
