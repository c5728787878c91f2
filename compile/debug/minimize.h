// Shrinks a graph on which a runner disagrees with interpret() to a few nodes that still show it.
// Invariant: each candidate is a graph that verifies; values from outside of it are inputs, with
// the values that they have in the whole graph.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "compile/ir/graph.h"

namespace tessera::compiler {

/// Runs a graph without implicit inputs on explicit ones.
using Runner = std::function<Tensors(const Graph&, std::span<const Tensor> inputs)>;

struct Reproducer {
  Graph graph;
  std::vector<Tensor> inputs;
  std::string failure;  // "output 0 differs", or what the runner threw
};
/// Prints the graph, what differs, and the values of inputs where they are few.
std::string to_string(const Reproducer& reproducer);

/// Removes nodes, fewer at a time as it goes on (delta debugging: Zeller and Hildebrandt 2002,
/// "Simplifying and Isolating Failure-Inducing Input"), while outputs or written inputs of `run`
/// differ in a bit from those of interpret(), or `run` throws and interpret() does not. `graph`
/// must have run on `inputs` and on the present values of its implicit inputs and have changed none
/// of them; they become inputs of the reproducer. Collectives are refused. Throws UserError when
/// nothing differs.
Reproducer minimize(const Graph& graph, std::span<const Tensor> inputs, const Runner& run);

}  // namespace tessera::compiler
