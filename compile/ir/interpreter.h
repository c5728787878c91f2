// The reference interpreter: what a compiled graph must equal.
#pragma once
#include <span>

#include "compile/ir/graph.h"

namespace tessera::compiler {

/// Runs the graph on the eager backend with `inputs` in place of those it was traced with: of equal
/// shape, strides, dtype and device, else ShapeError. Implicit inputs are read and written where
/// they are. Returns the outputs.
Tensors interpret(const Graph& graph, std::span<const Tensor> inputs);
inline Tensors interpret(const Graph& graph, std::initializer_list<Tensor> inputs) {
  return interpret(graph, std::span(inputs.begin(), inputs.size()));
}

/// Throws ShapeError, in the name of `who`, unless `inputs` are what the graph was traced with.
void check_inputs(std::string_view who, const Graph& graph, std::span<const Tensor> inputs);

}  // namespace tessera::compiler
