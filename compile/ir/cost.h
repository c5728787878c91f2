// Estimates of what nodes cost, for passes that weigh one against another.
#pragma once
#include "compile/ir/graph.h"

namespace tessera::compiler {

/// Bytes of a value's elements.
size_t bytes_of(const Graph& graph, ValueId id);

/// Microseconds that a node computes on a core of the order of magnitude of today's; 0 for views.
/// Nothing is measured, since every rank has to come to the same answer: only which of two takes
/// longer matters.
double compute_us(const Graph& graph, const Node& node);
/// The same for the communication of a collective.
double communication_us(const Graph& graph, const Node& node);

}  // namespace tessera::compiler
