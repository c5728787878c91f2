// Dead code, common subexpressions, constants, views: each pass on graphs that are small enough to
// read, and what each must not change.
#include <gtest/gtest.h>

#include "core/dispatch/context.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "tests/compile/passes/graphs.h"

namespace tessera::compiler {
namespace {

using test::checked, test::count, test::graph_of, test::nodes_of;

std::vector<Tensor> one_input() { return {from_values<float>({1, -2, 3, 4, -5, 6}, {2, 3})}; }

// ---- dead code

TEST(DeadCode, GoesWithWhatOnlyItNeeds) {
  auto in = one_input();
  Graph g = graph_of(in, [&]() -> Tensors {
    Tensor dead = exp(neg(in[0]));
    return {abs(in[0])};
  });
  EXPECT_EQ(nodes_of(checked(g, in, eliminate_dead_code)), "%1 = abs(%0)\nreturn %1\n");
}

TEST(DeadCode, EffectsOnMemoryThatOutlivesTheRunStay) {
  auto in = one_input();
  Tensor state = zeros({2, 3});
  Graph g = graph_of(in, [&]() -> Tensors {
    Tensor scratch = clone(in[0]);
    add_(scratch, in[0]);  // its result is not read
    add_(state, in[0]);
    return {};
  });
  EXPECT_EQ(nodes_of(checked(g, in, eliminate_dead_code)), "%2 = add(%1, %0) into %1\nreturn \n");
}

TEST(DeadCode, AnEffectIsDeadAfterTheLastRead) {
  auto in = one_input();
  Graph g = graph_of(in, [&]() -> Tensors {
    Tensor scratch = clone(in[0]);
    add_(scratch, in[0]);
    Tensor y = neg(scratch);
    mul_(scratch, 2);
    return {y};
  });
  EXPECT_EQ(nodes_of(checked(g, in, eliminate_dead_code)),
            "%1 = copy(%0)\n%2 = add(%1, %0) into %1\n%3 = neg(%2)\nreturn %3\n");
}

// ---- common subexpressions

TEST(CommonSubexpressions, EqualOpsAreOne) {
  auto in = one_input();
  Graph g = graph_of(in, [&]() -> Tensors { return {exp(in[0] * 2.0) + exp(in[0] * 2.0)}; });
  EXPECT_EQ(nodes_of(checked(g, in, eliminate_common_subexpressions)),
            "%1 = full(shape=[], value=2, dtype=\"f32\", device=\"cpu\")\n%2 = mul(%0, %1)\n"
            "%3 = exp(%2)\n%4 = add(%3, %3)\nreturn %4\n");
}

TEST(CommonSubexpressions, OutputsKeepMemoryOfTheirOwn) {
  auto in = one_input();
  Graph g = graph_of(in, [&]() -> Tensors { return {exp(in[0]), exp(in[0])}; });
  Graph after = checked(g, in, eliminate_common_subexpressions);
  EXPECT_EQ(count(after, "exp"), 2);
}

TEST(CommonSubexpressions, MemoryThatIsWrittenIsNotShared) {
  auto in = one_input();
  Graph g = graph_of(in, [&]() -> Tensors {
    Tensor a = clone(in[0]);
    add_(a, in[0]);
    Tensor b = clone(in[0]);  // the same op on the same operand, after a was written
    return {a * b};
  });
  EXPECT_EQ(count(checked(g, in, eliminate_common_subexpressions), "copy"), 2);
}

TEST(CommonSubexpressions, DrawsStay) {
  auto in = one_input();
  Tensor key = from_values<int64_t>({1, 2}, {2});
  Graph g = graph_of({key}, [&]() -> Tensors { return {rand({4}, {}, key) + rand({4}, {}, key)}; });
  EXPECT_EQ(count(checked(g, {&key, 1}, eliminate_common_subexpressions), "rand"), 2);
}

// A value that backward computes again would have to be kept from forward on.
TEST(CommonSubexpressions, PhasesDoNotShare) {
  auto in = one_input();
  Graph g = graph_of(in, [&]() -> Tensors {
    Tensor y = exp(in[0]);
    Scoped<Phase> backward(context().phase, Phase::kBackward);
    return {y * exp(in[0])};
  });
  EXPECT_EQ(count(checked(g, in, eliminate_common_subexpressions), "exp"), 2);
}

// ---- constants

TEST(Constants, OpsOnConstantsAreConstants) {
  auto in = one_input();
  Graph g = graph_of(in, [&]() -> Tensors {
    Tensor c = exp(cast(full({}, 2), kF32)) + 1.0;
    return {in[0] * expand(c, {2, 3})};
  });
  Graph after = checked(g, in, [](Graph& x) { fold_constants(x), eliminate_dead_code(x); });
  EXPECT_EQ(nodes_of(after),
            "%1 = full(shape=[], value=8.389056205749512, dtype=\"f32\", device=\"cpu\")\n"
            "%2 = expand(%1; to=[2, 3])\n%3 = mul(%0, %2)\nreturn %3\n");
}

TEST(Constants, IdentitiesVanish) {
  auto in = one_input();
  Graph g = graph_of(
      in, [&]() -> Tensors { return {neg(((in[0] * 1.0) / 1.0 - 0.0) + full({}, -0.0))}; });
  Graph after = checked(g, in, [](Graph& x) { fold_constants(x), eliminate_dead_code(x); });
  EXPECT_EQ(nodes_of(after), "%1 = neg(%0)\nreturn %1\n");
}

TEST(Constants, AddingZeroChangesMinusZero) {
  std::vector<Tensor> in = {from_values<float>({-0.0f, 1}, {2})};
  Graph g = graph_of(in, [&]() -> Tensors { return {1.0 / (in[0] + 0.0)}; });
  EXPECT_EQ(count(checked(g, in, fold_constants), "add"), 1);
  std::vector<Tensor> integers = {from_values<int64_t>({3, 1}, {2})};
  g = graph_of(integers, [&]() -> Tensors { return {neg(add(integers[0], 0))}; });
  EXPECT_EQ(count(checked(g, integers, fold_constants), "add"), 0);
}

TEST(Constants, AnOutputIsNotItsInput) {
  auto in = one_input();
  Graph g = graph_of(in, [&]() -> Tensors { return {in[0] * 1.0}; });
  EXPECT_EQ(count(checked(g, in, fold_constants), "mul"), 1);
}

TEST(Constants, CastsThatLoseNothing) {
  std::vector<Tensor> in = {cast(from_values<float>({1, -2.5, 3}, {3}), kBF16)};
  Graph g = graph_of(in, [&]() -> Tensors {
    Tensor back = cast(cast(in[0], kF32), kBF16);
    return {neg(back), cast(cast(in[0], kF32), kF64), cast(cast(in[0], kI64), kF32)};
  });
  Graph after = checked(g, in, [](Graph& x) { fold_constants(x), eliminate_dead_code(x); });
  EXPECT_EQ(nodes_of(after),
            "%1 = neg(%0)\n%2 = cast(%0; to=\"f64\")\n%3 = cast(%0; to=\"i64\")\n"
            "%4 = cast(%3; to=\"f32\")\nreturn %1, %2, %4\n");
}

TEST(Constants, IntegerDivisionByZeroIsLeftToItsKernel) {
  auto in = one_input();
  Graph g;
  EXPECT_THROW(
      g = graph_of(in, [&]() -> Tensors { return {floor_divide(full({}, 1), full({}, 0))}; }),
      UserError);
  g = graph_of(in, [&]() -> Tensors { return {floor_divide(full({}, 7), full({}, 2))}; });
  EXPECT_EQ(count(checked(g, in, fold_constants), "floor_divide"), 1);
}

// ---- views and copies

TEST(Views, ChainsCollapse) {
  auto in = one_input();
  Graph g = graph_of(in, [&]() -> Tensors {
    Tensor t = transpose(transpose(in[0], 0, 1), 0, 1);  // in[0] again
    Tensor r = reshape(reshape(t, {6}), {3, 2});
    return {neg(t), exp(r), expand_like(sum(in[0], {1}, true), in[0]) + in[0]};
  });
  Graph after = checked(g, in, [](Graph& x) { clean_views(x), eliminate_dead_code(x); });
  EXPECT_EQ(nodes_of(after),
            "%1 = reshape(%0; to=[3, 2])\n%2 = neg(%0)\n%3 = exp(%1)\n"
            "%4 = sum(%0; mask=2, keepdim=1)\n%5 = expand(%4; to=[2, 3])\n%6 = add(%5, %0)\n"
            "return %2, %3, %6\n");
}

TEST(Views, PermutesOfPermutes) {
  std::vector<Tensor> in = {reshape(arange(0, 24, 1, {kF32}), {2, 3, 4})};
  Graph g = graph_of(in, [&]() -> Tensors {
    return {exp(permute(permute(in[0], {2, 0, 1}), {1, 0, 2}))};
  });
  Graph after = checked(g, in, [](Graph& x) { clean_views(x), eliminate_dead_code(x); });
  EXPECT_EQ(nodes_of(after), "%1 = permute(%0; order=[0, 2, 1])\n%2 = exp(%1)\nreturn %2\n");
}

TEST(Views, CopiesOfFreshMemoryVanish) {
  auto in = one_input();
  Graph g = graph_of(in, [&]() -> Tensors { return {clone(exp(in[0]))}; });
  EXPECT_EQ(nodes_of(checked(g, in, clean_views)), "%1 = exp(%0)\nreturn %1\n");
  g = graph_of(in, [&]() -> Tensors {
    Tensor s = sum(in[0], {0}, true);
    return {clone(reshape(s, {3}))};
  });
  EXPECT_EQ(nodes_of(checked(g, in, clean_views)),
            "%1 = sum(%0; mask=1, keepdim=1)\n%2 = reshape(%1; to=[3])\nreturn %2\n");
}

TEST(Views, CopiesStayWhereMemoryTells) {
  auto in = one_input();
  Tensor state = from_values<float>({1, 1, 1, 1, 1, 1}, {2, 3});
  auto copies_left = [&](auto step) {
    return count(checked(graph_of(in, step), in, clean_views), "copy");
  };
  EXPECT_EQ(copies_left([&]() -> Tensors { return {clone(in[0])}; }), 1);  // an output is new
  EXPECT_EQ(copies_left([&]() -> Tensors {
              Tensor y = exp(in[0]);
              return {y, clone(y)};  // two outputs, two memories
            }),
            1);
  EXPECT_EQ(copies_left([&]() -> Tensors {
              Tensor old = clone(state);
              add_(state, in[0]);  // the source is written while the copy is read
              return {exp(old)};
            }),
            1);
  EXPECT_EQ(copies_left([&]() -> Tensors {
              Tensor mine = clone(state);
              add_(mine, in[0]);  // the copy is written
              return {exp(mine)};
            }),
            1);
  EXPECT_EQ(copies_left([&]() -> Tensors { return {exp(clone(transpose(in[0], 0, 1)))}; }), 1);
  EXPECT_EQ(copies_left([&]() -> Tensors {
              Tensor old = clone(state), y = exp(old);
              add_(state, in[0]);  // after the copy's last read
              return {y};
            }),
            0);
}

TEST(Views, PiecesOfABucketStayEffects) {
  auto in = one_input();
  Graph g = graph_of(in, [&]() -> Tensors {
    Tensor bucket = zeros({12});
    assign_(reshape(narrow(bucket, 0, 6, 6), {2, 3}), exp(in[0]));
    return {bucket};
  });
  Graph after = checked(g, in, [](Graph& x) { run_passes(x, "decompose,accumulate,fuse"); });
  EXPECT_EQ(count(after, "copy"), 1);
  EXPECT_FALSE(after.nodes.back().into.empty() && after.nodes[after.nodes.size() - 2].into.empty());
}

// ---- all together

TEST(Pipeline, LeavesOutWhatIsNamed) {
  auto in = one_input();
  Graph g = graph_of(in, [&]() -> Tensors {
    Tensor dead = exp(in[0]);
    return {neg(in[0] * 1.0)};
  });
  EXPECT_EQ(nodes_of(checked(g, in, [](Graph& x) { run_passes(x, "decompose,accumulate,fuse"); })),
            "%1 = neg(%0)\nreturn %1\n");
  Graph whole =
      checked(g, in, [](Graph& x) { run_passes(x, "constants,dce,decompose,accumulate,fuse"); });
  EXPECT_EQ(count(whole, "mul") + count(whole, "exp"), 2);
  try {
    run_passes(g, "cse,fold");
    FAIL();
  } catch (const UserError& e) {
    EXPECT_NE(std::string(e.what()).find("there is no pass fold"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace tessera::compiler
