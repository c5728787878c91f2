// neg(neg(x)) is x. What it leaves without readers is removed by the passes that follow.
#include <atomic>

#include "compile/ir/rewrite.h"
#include "compile/passes/passes.h"

using namespace tessera::compiler;

std::atomic<int> negations_dropped = 0;

void drop_double_negations(Graph& graph) {
  const Uses uses(graph);
  Rewrite rewrite(graph);
  auto negates = [](const Node& n) { return n.prim && n.prim->name() == "neg" && n.into.empty(); };
  for (size_t k = 0; k < graph.nodes.size(); ++k) {
    Node& outer = graph.nodes[k];
    if (!negates(outer)) continue;
    const int32_t producer = uses.producer[size_t(outer.in[0])];
    if (producer == kNoNode || !negates(graph.nodes[size_t(producer)])) continue;
    const ValueId x = rewrite.now(graph.nodes[size_t(producer)].in[0]);
    if (!rewrite.try_alias(outer.out[0], x, int32_t(k))) continue;
    outer.prim = {};
    ++negations_dropped;
  }
  rewrite.apply();
}
