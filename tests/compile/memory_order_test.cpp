// Orders of nodes that need less memory. Nodes can run in these orders: random steps compute the
// same bits.
#include "compile/run/memory_order.h"

#include "collectives/loopback/run_ranks.h"
#include "collectives/ops.h"
#include "compile/run/program.h"
#include "core/ops/contract.h"
#include "core/ops/random.h"
#include "tests/compile/passes/fuzz.h"
#include "tests/compile/passes/graphs.h"

namespace tessera::compiler {
namespace {

using test::checked, test::expect_same_bits, test::graph_of, test::nodes_of;

size_t arena_of(const Graph& g) { return make_program(g).arena_bytes(); }

TEST(MemoryOrder, TheGradientOfTheWeightGoesFirst) {
  // In f64, whose products take no scratch.
  Tensor x = rand({64, 32}).to(kF64), g = rand({64, 32}).to(kF64), w = rand({32, 32}).to(kF64);
  Graph graph = graph_of({x, g, w}, [&] {
    Tensor h = exp(x);
    Tensor dh = matmul(g, w);                   // as large as h, which is read once more
    Tensor dw = matmul(transpose(h, 0, 1), g);  // small
    return Tensors{sum(dh * 2.0), sum(dw)};
  });
  Graph after = checked(graph, std::vector<Tensor>{x, g, w}, order_for_memory);
  constexpr size_t kLarge = 64 * 32 * 8, kSmall = 32 * 32 * 8;
  EXPECT_EQ(arena_of(graph), 2 * kLarge + kSmall);
  EXPECT_EQ(arena_of(after), kLarge + kSmall + kArenaAlign) << to_string(after);  // and a sum
}

TEST(MemoryOrder, NothingMovesAcrossEffects) {
  Tensor x = rand({16}), state = rand({16});
  Graph graph = graph_of({x}, [&] {
    Tensor large = expand(x, {8, 16}) * 2.0;
    assign_(state, x);
    Tensor small = sum(x * state);
    return Tensors{sum(large), small};
  });
  EXPECT_EQ(nodes_of(checked(graph, std::vector<Tensor>{x}, order_for_memory)), nodes_of(graph));
}

// Moving the reader up would free the gathered tensor, but wait for it.
TEST(MemoryOrder, ReadersOfCollectivesDoNotMoveUp) {
  run_ranks(1, [](ProcessGroup& g) {
    Tensor x = rand({16}), bucket = zeros({16});
    Graph graph = graph_of({x}, [&] {
      Tensor all = all_gather(x * 1.0, Ref<ProcessGroup>(&g));
      all_reduce_(bucket, Ref<ProcessGroup>(&g));
      Tensor large = exp(expand(x, {8, 16}));
      return Tensors{sum(gelu(large)), sum(reshape(all, {4, 4})), sum(slice(bucket, 0, 0, 8))};
    });
    auto ops = [](const Graph& graph) {
      std::string names;
      for (const Node& n : graph.nodes)
        if (n.role != Role::kView) names += std::string(n.prim->name()) + " ";
      return names;
    };
    EXPECT_EQ(ops(checked(graph, std::vector<Tensor>{x}, order_for_memory)), ops(graph));
  });
}

TEST(MemoryOrder, RandomSteps) {
  size_t before = 0, after = 0;
  for (uint64_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    test::RandomStep step(seed);
    Graph graph = graph_of(step.inputs, [&] { return step.run(); });
    Graph ordered = checked(graph, step.inputs, order_for_memory);
    before += arena_of(graph), after += arena_of(ordered);
    if (HasFailure()) return;
  }
  EXPECT_LE(after, before);
}

}  // namespace
}  // namespace tessera::compiler
