#include <gtest/gtest.h>

#include "collectives/loopback/run_ranks.h"
#include "collectives/ops.h"
#include "compile/compile.h"
#include "core/core.h"

using namespace tessera;

Tensor scatter_rows(const Tensor& x, const Ref<ProcessGroup>& group, int root);

namespace {

Tensor rows(int64_t begin, int64_t end) {
  return reshape(arange(begin * 3, end * 3, 1, {.dtype = kF32}), {end - begin, 3});
}

TEST(Collective, GivesEachRankItsRows) {
  for (int root : {0, 1, 2})
    run_ranks(3, [&](ProcessGroup& g) {
      const Ref<ProcessGroup> group(&g);
      const Tensor x = g.rank() == root ? rows(0, 6) : zeros({6, 3});
      const Tensor mine = rows(2 * g.rank(), 2 * g.rank() + 2);
      EXPECT_TRUE(equal(scatter_rows(x, group, root), mine));
      EXPECT_TRUE(
          equal(scatter_rows(transpose(transpose(x, 0, 1) * 1.0, 0, 1), group, root), mine));
      EXPECT_TRUE(equal(scatter_rows(x * 2.0, group, root) + 1.0, mine * 2.0 + 1.0));
      EXPECT_THROW(scatter_rows(zeros({5}), group, root), ShapeError);
      EXPECT_THROW(grad([&](const Tensor& t) { return sum(scatter_rows(t, group, root)); })(x),
                   NotDifferentiable);
    });
}

// Beside other collectives on the same group; its result is not read by the last of them.
TEST(Collective, IsANodeOfACompiledStep) {
  run_ranks(2, [](ProcessGroup& g) {
    const Ref<ProcessGroup> group(&g);
    const auto eager = [&](const Tensor& x) {
      const Tensor mine = scatter_rows(x * 2.0, group, 1), all = all_reduce(x, group);
      scatter_rows(x, group, 0);  // an unused result: the call still runs on both ranks
      return std::pair(mine + 1.0, all);
    };
    auto step = compile(eager, {.name = "scatter_rows"});
    for (int i = 0; i < 6; ++i) {
      const Tensor x = rows(0, 4) * double(1 + i + 10 * g.rank());
      const auto [mine, all] = step(x);
      EXPECT_TRUE(equal(mine, rows(2 * g.rank(), 2 * g.rank() + 2) * (2.0 * (11 + i)) + 1.0)) << i;
      EXPECT_TRUE(equal(all, rows(0, 4) * (12.0 + 2 * i))) << i;
    }
    EXPECT_GT(step.report().replays, 0) << step.report().why_not;
    EXPECT_EQ(step.report().unoptimised, "");
  });
}

}  // namespace
