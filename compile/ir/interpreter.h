// The reference interpreter of graphs. A compiled graph must compute what it computes.
#pragma once
#include <span>

#include "compile/ir/graph.h"

namespace tessera::compiler {

/// Runs the graph on the eager backend and returns its outputs. `inputs` take the place of those it
/// was traced with; throws ShapeError unless shape, strides, dtype and device are equal. Implicit
/// inputs are read and written where they are.
Tensors interpret(const Graph& graph, std::span<const Tensor> inputs);
inline Tensors interpret(const Graph& graph, std::initializer_list<Tensor> inputs) {
  return interpret(graph, std::span(inputs.begin(), inputs.size()));
}

/// Throws ShapeError unless `inputs` are like those that the graph was traced with. `who` begins
/// its text.
void check_inputs(std::string_view who, const Graph& graph, std::span<const Tensor> inputs);

}  // namespace tessera::compiler
