// What a graph that is about to run for the first time says to the other ranks: all its
// collectives, which go along with the first of each group and are compared there, before anything
// moves.
#pragma once
#include "collectives/ops.h"
#include "compile/ir/graph.h"

namespace tessera::compiler {

/// The collectives of `graph`, in the order of its nodes, by group.
CallOrderScope::List collective_orders(const Graph& graph);

}  // namespace tessera::compiler
