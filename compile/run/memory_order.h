// Reorders nodes so that a run needs less memory: of two neighbours that do not depend on each
// other, the one that frees more than it makes goes first. Invariants: effects and collectives stay
// where they are, and nothing moves across them; a reader of a collective's result begins no
// earlier than before.
#pragma once
#include "compile/ir/graph.h"

namespace tessera::compiler {

/// Reorders pure nodes. Two neighbours are exchanged where that lowers the most memory that the two
/// need at once, until nothing changes: this is the rule of Liu 1987 ("An application of
/// generalized tree pebbling to sparse matrix factorization") for two jobs, applied to neighbours.
/// Views follow what they view. The gain in backward: the gradient of a weight, which needs the
/// activation for the last time, is computed before that of the activation.
void order_for_memory(Graph& graph);

}  // namespace tessera::compiler
