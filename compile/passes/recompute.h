// Computing values of the forward pass again in backward, instead of keeping them until then.
#pragma once
#include <vector>

#include "compile/ir/graph.h"

namespace tessera::compiler {

/// Nodes of the forward pass whose results backward reads and may compute again, in groups: first
/// the group that takes least time for the memory it frees, by estimate, given that those before
/// it are computed again too. A group holds what it needs that is not kept. Never among them:
/// effects, collectives, random draws, results that are outputs.
std::vector<std::vector<int32_t>> recomputable(const Graph& graph);

/// `graph` with copies of `nodes` in backward, each before its first reader there. Computes the
/// same bits.
Graph recomputed(const Graph& graph, const std::vector<int32_t>& nodes);

}  // namespace tessera::compiler
