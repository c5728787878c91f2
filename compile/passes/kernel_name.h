// Names of fused kernels, for people who read profiles and generated code.
#pragma once
#include <span>
#include <string>

#include "compile/ir/graph.h"

namespace tessera::compiler {

/// The module of the last node and what the nodes do: "h_0_mlp_add_gelu". Arithmetic is left out
/// where there is more to tell.
std::string kernel_name(const Graph& graph, std::span<const int32_t> nodes);

}  // namespace tessera::compiler
