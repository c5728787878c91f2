// What a graph must obey, checked after tracing and after every pass.
#pragma once
#include <span>

#include "compile/ir/graph.h"

namespace tessera::compiler {

/// Throws BugError that names the first offending node, unless every value is defined once and
/// before it is read; infer of each node gives the types of its results, and a view the strides and
/// offset as well; results are in memory of their own, views in that of operand 0, results of
/// effects in that of their places, of the same type and layout; nothing is read after its memory
/// was overwritten; inputs are what they say; scopes and phases exist.
void verify(const Graph& graph);

}  // namespace tessera::compiler
