// The order of nodes that needs less memory: of two neighbours that do not depend on each other,
// the one that frees more than it makes goes first. Invariants: effects and collectives stay where
// they are, and nothing moves across them; what reads the result of a collective begins no earlier.
#pragma once
#include "compile/ir/graph.h"

namespace tessera::compiler {

/// Reorders pure nodes. Neighbours are exchanged where the most that the two of them need at once
/// falls by it, until nothing changes: the rule of Liu 1987 ("An application of generalized tree
/// pebbling to sparse matrix factorization") for two jobs, applied to neighbours. Views follow what
/// they view. Backward computes the gradient of a weight, which needs the activation for the last
/// time, before that of the activation.
void order_for_memory(Graph& graph);

}  // namespace tessera::compiler
