// Checks the invariants of a graph, after tracing and after every pass.
#pragma once
#include <span>

#include "compile/ir/graph.h"

namespace tessera::compiler {

/// Throws BugError that names the first offending node, unless all of this holds. Every value is
/// defined once and before it is read. Types are those that infer gives; for views, so are strides
/// and offset. Results are in memory of their own, views in the memory of operand 0, results of
/// effects in that of the places they write, with the same type and layout. Nothing is read after
/// its memory was overwritten. Inputs have the layouts they are declared with; scopes and phases
/// exist.
void verify(const Graph& graph);

}  // namespace tessera::compiler
