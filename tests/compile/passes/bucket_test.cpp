// Small reductions become one where nobody can tell but by the number of calls.
#include <gtest/gtest.h>

#include "collectives/loopback/run_ranks.h"
#include "collectives/ops.h"
#include "core/ops/pointwise.h"
#include "core/ops/random.h"
#include "core/ops/reduce.h"
#include "core/ops/update.h"
#include "core/ops/views.h"
#include "tests/compile/passes/graphs.h"

namespace tessera::compiler {
namespace {

using test::count, test::graph_of;

// Reductions left after the pass, on one rank (values do not change) and on two (compared there).
template <class F>
int packed(std::vector<Tensor> in, F step) {
  int left = -1;
  run_ranks(2, [&](ProcessGroup& g) {
    std::vector<Tensor> mine;
    for (const Tensor& t : in) mine.push_back(t * double(g.rank() + 1));
    Graph graph = graph_of(mine, [&] { return step(Ref<ProcessGroup>(&g), mine); });
    Graph after = graph;
    bucket_collectives(after);
    verify(after);
    test::expect_same_sharing(after, graph);
    test::expect_same_bits(test::results(after, mine), test::results(graph, mine),
                           to_string(after));
    if (g.rank() == 0) left = count(after, "all_reduce");
  });
  return left;
}
using In = std::vector<Tensor>;

TEST(Bucket, NeighboursOfOneKind) {
  Tensor x = rand({16, 3}), y = rand({5}), z = rand({2, 2, 2});
  EXPECT_EQ(packed({x, y, z},
                   [](auto group, const In& in) {
                     Tensor a = all_reduce(transpose(in[0], 0, 1), group),
                            b = all_reduce(in[1] * 2.0, group), c = all_reduce(in[2], group);
                     return Tensors{a + 1.0, sum(b), exp(transpose(c, 0, 2))};
                   }),
            1);
  // Sums, then largest elements: two kinds.
  EXPECT_EQ(packed({x, y, z},
                   [](auto group, const In& in) {
                     Tensor a = all_reduce(in[0], group), b = all_reduce(in[1], group);
                     Tensor c = all_reduce(in[1], group, ReduceOp::kMax),
                            d = all_reduce(in[2], group, ReduceOp::kMax);
                     return Tensors{a + 1.0, sum(b), exp(c), sum(d)};
                   }),
            2);
}

TEST(Bucket, WhatNeedsAResultComesAfterIt) {
  Tensor x = rand({16}), y = rand({16});
  EXPECT_EQ(packed({x, y},
                   [](auto group, const In& in) {
                     Tensor a = all_reduce(in[0], group);
                     return Tensors{all_reduce(in[1] * a, group) + 1.0};
                   }),
            2);
  EXPECT_EQ(packed({x, y},  // read between the two
                   [](auto group, const In& in) {
                     Tensor a = all_reduce(in[0], group), b = exp(a);
                     return Tensors{b, all_reduce(in[1], group) + 1.0};
                   }),
            2);
}

TEST(Bucket, MemoryThatIsWrittenOrReturned) {
  Tensor x = rand({16}), y = rand({16});
  EXPECT_EQ(packed({x, y},  // an operand changes before the second
                   [](auto group, const In& in) {
                     Tensor a = all_reduce(in[0], group);
                     assign_(in[0], in[1]);
                     return Tensors{a + 1.0, all_reduce(in[0], group) + 1.0};
                   }),
            2);
  EXPECT_EQ(packed({x, y},  // outputs have memory of their own
                   [](auto group, const In& in) {
                     return Tensors{all_reduce(in[0], group), all_reduce(in[1], group)};
                   }),
            2);
}

TEST(Bucket, LargeOnesGoAlone) {
  Tensor large = rand({1 << 16}), x = rand({16}), y = rand({16});
  EXPECT_EQ(packed({large, x, y},
                   [](auto group, const In& in) {
                     Tensor a = all_reduce(in[0], group), b = all_reduce(in[1], group),
                            c = all_reduce(in[2], group);
                     return Tensors{a + 1.0, b + 1.0, c + 1.0};
                   }),
            2);
  std::vector<Tensor> many(20, rand({1 << 14}));  // 64 KiB each: a bucket holds 16
  EXPECT_EQ(packed(many,
                   [](auto group, const In& in) {
                     Tensors out;
                     for (const Tensor& t : in) out.push_back(all_reduce(t, group));
                     for (Tensor& t : out) t = t + 1.0;
                     return out;
                   }),
            2);
}

}  // namespace
}  // namespace tessera::compiler
