// Estimates of what nodes cost, for passes that weigh one against another.
#pragma once
#include "compile/ir/graph.h"

namespace tessera::compiler {

/// Bytes of a value's elements.
size_t bytes_of(const Graph& graph, ValueId id);

/// Estimates the microseconds that a node takes on a present-day core; 0 for views. It is computed
/// and not measured, since every rank must come to the same answer. Only the order of magnitude is
/// meant: which of two nodes takes longer.
double compute_us(const Graph& graph, const Node& node);
/// Estimates the microseconds that the communication of a collective takes.
double communication_us(const Graph& graph, const Node& node);

}  // namespace tessera::compiler
