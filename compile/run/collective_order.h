// The order of a graph's collectives, which ranks compare before they run the graph for the first
// time. The order travels with the first collective of each group and is checked there before any
// data moves.
#pragma once
#include "collectives/ops.h"
#include "compile/ir/graph.h"

namespace tessera::compiler {

/// The collectives of `graph`, in the order of its nodes, by group.
CallOrderScope::List collective_orders(const Graph& graph);

}  // namespace tessera::compiler
