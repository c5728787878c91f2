// From a recorded graph to one that runs fast: passes, code, executor.
#pragma once
#include "compile/compile.h"
#include "compile/executor.h"
#include "compile/passes/passes.h"

namespace tessera::compiler {

/// Passes over `graph`, the `number`th of its function, code for its fused ops, and memory. Where
/// code cannot be had (no compiler, a cache that cannot be written), that is said once and the
/// graph runs without fused ops. Where a pass throws, the graph runs as it was recorded; that is
/// logged, and `*unoptimised` says why. `passes`: those of pipeline() when empty. Throws UserError
/// for a name in options.skip that no pass has.
Executor build(Graph graph, const CompileOptions& options, int number = 1,
               std::string* unoptimised = nullptr, std::span<const Pass> passes = {});

}  // namespace tessera::compiler
