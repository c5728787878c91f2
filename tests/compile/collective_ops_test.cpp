// Collectives on the dispatch path: their results, and their nodes in a traced graph.
#include <gtest/gtest.h>

#include <functional>

#include "collectives/loopback/run_ranks.h"
#include "collectives/ops.h"
#include "compile/ir/interpreter.h"
#include "compile/record/trace.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/update.h"
#include "core/ops/views.h"

namespace tessera::compiler {
namespace {

// Runs on the threads of ranks, where a failed EXPECT would not stop the others.
void check(const Tensor& t, std::vector<double> expected, const char* what) {
  Tensor dense = contiguous(t);
  TESSERA_CHECK(size_t(dense.numel()) == expected.size(), "{}: got {}", what, describe(t));
  for (size_t i = 0; i < expected.size(); ++i)
    TESSERA_CHECK(dense.data<double>()[i] == expected[i], "{}: element {} is {}, expected {}", what,
                  i, dense.data<double>()[i], expected[i]);
}

Ref<ProcessGroup> group_of(ProcessGroup& g) { return Ref<ProcessGroup>(&g); }

TEST(CollectiveOps, Results) {
  run_ranks(2, [](ProcessGroup& g) {
    auto group = group_of(g);
    double r = g.rank();
    Tensor x = from_values<double>({1 + r, 10 * (1 + r)}, {2});
    check(all_reduce(x, group), {3, 30}, "all_reduce");
    check(all_reduce(x, group, ReduceOp::kMax), {2, 20}, "all_reduce max");
    check(all_gather(x, group), {1, 10, 2, 20}, "all_gather");
    check(reduce_scatter(x, group), {r == 0 ? 3.0 : 30.0}, "reduce_scatter");
    check(broadcast(x, group, 1), {2, 20}, "broadcast");
    check(all_to_all(x, group), r == 0 ? std::vector<double>{1, 2} : std::vector<double>{10, 20},
          "all_to_all");
    check(x, {1 + r, 10 * (1 + r)}, "the operand");
    check(all_reduce(transpose(reshape(x * 1.0, {1, 2}), 0, 1), group), {3, 30}, "a view");
    check(all_reduce(x * 2.0, group) + 1.0, {7, 61}, "a temporary");
    all_reduce_(x, group);
    check(x, {3, 30}, "all_reduce_");
    Tensor y = from_values<double>({r}, {1});
    broadcast_(y, group, 1);
    check(y, {1}, "broadcast_");
  });
}

TEST(CollectiveOps, AreNodesOfATrace) {
  run_ranks(2, [](ProcessGroup& g) {
    auto group = group_of(g);
    double r = g.rank();
    Tensor total = from_values<double>({0}, {1}), x = from_values<double>({1 + r}, {1});
    Trace trace({.inputs = {x}});
    Tensor y = all_reduce(x * 2.0, group);
    add_(total, y);
    all_reduce_(total, group);
    Tensor all = all_gather(total + x, group);
    Graph graph = trace.finish({all});
    check(all, {13, 14}, "traced");
    std::string order;
    for (const Node& n : graph.nodes)
      if (n.role == Role::kCollective) order += std::string(n.prim->name()) + " ";
    TESSERA_CHECK(order == "all_reduce all_reduce all_gather ", "order: {}", order);
    Tensor other = from_values<double>({3 + r}, {1});
    check(interpret(graph, {other})[0], {2 * (12 + 14) + 3, 2 * (12 + 14) + 4}, "replayed");
  });
}

// Data parallelism in short: gradients are put into views of a bucket, the bucket is reduced, the
// views are read.
TEST(CollectiveOps, BucketsOfViews) {
  run_ranks(2, [](ProcessGroup& g) {
    auto group = group_of(g);
    Tensor bucket = zeros({4}, {kF64}), a = slice(bucket, 0, 0, 2), b = slice(bucket, 0, 2, 4);
    auto step = [&](const Tensor& x) {
      assign_(a, x);
      assign_(b, x * 10.0);
      all_reduce_(bucket, group);
      return a + b;
    };
    double r = g.rank();
    Tensor x = from_values<double>({1 + r, 2 + r}, {2}), y = from_values<double>({r, 5}, {2});
    Trace trace({.inputs = {x}});
    Tensor out = step(x);
    Graph graph = trace.finish({out, b});
    check(out, {33, 55}, "traced");
    Tensors again = interpret(graph, {y});
    check(again[0], {11, 110}, "replayed");
    check(again[1], {10, 100}, "a view after the reduction");
    check(bucket, {1, 10, 10, 100}, "the bucket");
  });
}

// The error comes before any other rank is told, so the ranks stay together.
TEST(CollectiveOps, AVerbOfAGroupInsideATraceIsRefused) {
  run_ranks(2, [](ProcessGroup& g) {
    Tensor x = from_values<double>({1}, {1}), y = empty({1}, kF64);
    int refused = 0;
    {
      Trace trace;
      std::function<void()> verbs[] = {
          [&] { g.all_reduce(x); }, [&] { g.recv_async(y, 1 - g.rank()); }, [&] { g.barrier(); }};
      for (auto& verb : verbs) {
        try {
          verb();
        } catch (const UserError& e) {
          TESSERA_CHECK(std::string_view(e.what()).find("use those of collectives/ops.h") !=
                            std::string_view::npos,
                        "{}", e.what());
          ++refused;
        }
      }
    }
    TESSERA_CHECK(refused == 3, "{} of 3 were refused", refused);
    g.all_reduce(x);
    check(x, {2}, "after the trace");
  });
}

TEST(CollectiveOps, Refuses) {
  run_ranks(1, [](ProcessGroup& g) {
    Tensor x = from_values<double>({1}, {1});
    auto text = [](auto f) -> std::string {
      try {
        f();
      } catch (const UserError& e) {
        return e.what();
      }
      return "no error";
    };
    EXPECT_NE(text([&] { all_reduce(x, nullptr); }).find("no group"), std::string::npos);
    EXPECT_NE(text([&] { broadcast(x, group_of(g), 3); }).find("root 3"), std::string::npos);
    EXPECT_NE(text([&] { all_to_all(select(x, 0, 0), group_of(g)); }).find("cannot be cut"),
              std::string::npos);
  });
}

}  // namespace
}  // namespace tessera::compiler
