// Draws graphs: one box for each op, coloured by phase, grouped by the module that the op comes
// from.
#pragma once
#include <string>

#include "compile/ir/graph.h"

namespace tessera::compiler {

/// The graph in the DOT language of Graphviz. Solid edges are reads, dashed ones lead from an
/// effect to the memory it writes; inputs and outputs are ellipses, collectives have a double
/// border.
std::string to_dot(const Graph& graph);
/// Draws the graph as SVG with Graphviz's `dot` into the file `path`. Throws UserError where the
/// program is not installed or fails.
void draw_svg(const Graph& graph, const std::string& path);

}  // namespace tessera::compiler
