// Graphs as files, with the tensors that they run on: a safetensors file whose tensor "graph" is
// JSON text and whose others are the memories of inputs ("input.0") and implicit inputs
// ("implicit.0"). So what a minimiser found can be kept, sent and run again. Invariant: a graph
// that loads verifies, its layouts are those that its ops give, and no access leaves its memory; a
// hostile file costs bounded memory and an error.
#pragma once
#include <string>
#include <vector>

#include "collectives/process_group.h"
#include "compile/debug/minimize.h"

namespace tessera::compiler {

/// Writes `graph`, the values of its implicit inputs and of `inputs` (one for each input, or none)
/// and `note`, whatever it is kept for, to `path`. Generated code is not kept: fused ops run
/// interpreted until they are built again. Throws UserError where the file cannot be written.
void save_graph(const std::string& path, const Graph& graph, std::span<const Tensor> inputs = {},
                const std::string& note = "");
inline void save_graph(const std::string& path, const Reproducer& r) {
  save_graph(path, r.graph, r.inputs, r.failure);
}

/// What save_graph wrote; `inputs` is empty where none were given, `failure` is the note. Implicit
/// inputs are tensors of their own with the values that they had. `groups`: by whose names the
/// graph's collectives find theirs. Throws UserError for what is no such file, naming what is
/// wrong.
Reproducer load_graph(const std::string& path, std::span<const Ref<ProcessGroup>> groups = {});

/// The JSON text of a graph, and back, without values: implicit inputs are zeros.
std::string graph_to_json(const Graph& graph);
Graph graph_from_json(const std::string& text, std::span<const Ref<ProcessGroup>> groups = {});

}  // namespace tessera::compiler
