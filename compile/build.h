// From a recorded graph to one that runs fast: passes, code, executor.
#pragma once
#include "compile/compile.h"
#include "compile/executor.h"

namespace tessera::compiler {

/// Passes over `graph`, the `number`th of its function, code for its fused ops, and memory. Where
/// code cannot be had (no compiler, a cache that cannot be written), that is said once and the
/// graph runs without fused ops.
Executor build(Graph graph, const CompileOptions& options, int number = 1);

}  // namespace tessera::compiler
