// Saves and loads graphs with the tensors that they run on, so that what a minimiser found can be
// kept, sent and run again. The file is in safetensors format: the tensor "graph" is JSON text, the
// others are the memories of inputs ("input.0") and implicit inputs ("implicit.0"). Invariant: a
// graph that loads verifies, its layouts are those that its ops give, and no access leaves its
// memory; a malicious file costs bounded memory and an error.
#pragma once
#include <string>
#include <vector>

#include "collectives/process_group.h"
#include "compile/debug/minimize.h"

namespace tessera::compiler {

/// Writes `graph`, the values of its implicit inputs and of `inputs` (one for each input, or none),
/// and a free text `note` to `path`. Generated code is not saved: fused ops run interpreted until
/// they are built again. Throws UserError where the file cannot be written.
void save_graph(const std::string& path, const Graph& graph, std::span<const Tensor> inputs = {},
                const std::string& note = "");
inline void save_graph(const std::string& path, const Reproducer& r) {
  save_graph(path, r.graph, r.inputs, r.failure);
}

/// Loads what save_graph wrote. `inputs` of the result is empty where none were given, `failure` is
/// the note. Implicit inputs are tensors of their own with the values that they had. Collectives
/// find their group in `groups` by its name. Throws UserError for a file that is not of this kind,
/// naming what is wrong.
Reproducer load_graph(const std::string& path, std::span<const Ref<ProcessGroup>> groups = {});

/// Converts a graph to JSON text and back, without values: implicit inputs become zeros.
std::string graph_to_json(const Graph& graph);
Graph graph_from_json(const std::string& text, std::span<const Ref<ProcessGroup>> groups = {});

}  // namespace tessera::compiler
