// Ops of a program's own on sharded tensors: an elementwise op is cut as its operands are, and an
// opaque one by the loops that it states, or not at all.
#include "core/autograd/custom_op.h"

#include <gtest/gtest.h>

#include "collectives/loopback/run_ranks.h"
#include "core/autograd/autograd.h"
#include "core/ops/compose.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "dtensor/dtensor.h"

namespace tessera::test {
namespace {

void fill_cubes(const Tensor& x, Tensor& y) {
  for (int64_t i = 0; i < x.numel(); ++i) {
    const float v = x.values<float>()[i];
    y.data<float>()[i] = v * v * v;
  }
}
Meta like(const Meta& x) { return x; }
Tensor cube_vjp(const Tensor& x, const Meta&, const Tensor& dy) { return dy * square(x) * 3.0; }

const auto whole_cube = custom_op("test::whole_cube", like, fill_cubes, cube_vjp);
const auto split_cube =
    custom_op("test::split_cube", like, fill_cubes, cube_vjp, {.axes = elementwise_axes});
const auto cube = elementwise("test::cube", [](const Tensor& x) { return x * x * x; });

void expect_cut(const std::function<Tensor(const Tensor&)>& f, const DeviceMesh& mesh,
                const Placement& placement) {
  manual_seed(1);
  const Tensor x = randn({6, 4});
  Tensor leaf = x.clone().requires_grad_();
  const Tensor y = f(distribute(leaf, mesh, {placement}));
  TESSERA_ASSERT(layout_of(y) == Layout{placement}, "{}", to_string(layout_of(y)));
  TESSERA_ASSERT(equal(full_tensor(y.detach()), x * x * x), "values");
  Tensor loss = full_tensor(sum(y));
  loss.backward();
  TESSERA_ASSERT(allclose(local_of(leaf.grad()), square(x) * 3.0), "gradients");
}

TEST(CustomOp, IsCutByItsLoops) {
  run_ranks(2, [](ProcessGroup&) {
    const DeviceMesh mesh = init_device_mesh({{"dp", 2}});
    for (const Placement& p : {Shard(0), Shard(1), Replicate()}) {
      expect_cut(split_cube, mesh, p);
      expect_cut(cube, mesh, p);
    }
    expect_cut(whole_cube, mesh, Replicate());
    const Tensor cut = distribute(ones({6, 4}), mesh, {Shard(0)});
    std::string text;
    try {
      whole_cube(cut);
    } catch (const UserError& e) {
      text = e.what();
    }
    TESSERA_ASSERT(text.find("test::whole_cube: operand 0") == 0 &&
                       text.find("is cut, but the op works on whole tensors") != std::string::npos,
                   "{}", text);
  });
}

}  // namespace
}  // namespace tessera::test
