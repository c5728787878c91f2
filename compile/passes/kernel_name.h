// Names fused kernels, for readers of profiles and generated code.
#pragma once
#include <span>
#include <string>

#include "compile/ir/graph.h"

namespace tessera::compiler {

/// The module of the last node and the ops of the nodes: "h_0_mlp_add_gelu". Arithmetic is left out
/// where there is more to say.
std::string kernel_name(const Graph& graph, std::span<const int32_t> nodes);

}  // namespace tessera::compiler
