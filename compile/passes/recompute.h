// Computes values of the forward pass again in backward instead of keeping them until then, to save
// memory.
#pragma once
#include <vector>

#include "compile/ir/graph.h"

namespace tessera::compiler {

/// Returns the nodes of the forward pass whose results backward reads and may compute again, in
/// groups. Groups are ordered by the estimated time they take for the memory they free, the best
/// first, given that the groups before are computed again too. A group includes what it needs that
/// is not kept. Effects, collectives
/// and producers of outputs are never among them; a random draw may be, since its key gives it
/// again.
std::vector<std::vector<int32_t>> recomputable(const Graph& graph);

/// Returns `graph` with copies of `nodes` in backward, each before its first reader there. It
/// computes the same bits.
Graph recomputed(const Graph& graph, const std::vector<int32_t>& nodes);

}  // namespace tessera::compiler
