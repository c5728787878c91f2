// Converts sharded tensors to pieces. This is the only place where checkpoints depend on layouts.
#pragma once
#include "dtensor/dtensor.h"
#include "parallel/checkpoint/piece.h"

namespace tessera::checkpoint {

/// Returns the piece of `t` that this rank holds; `t` may be plain (a whole tensor) or sharded.
/// `values` shares its memory, so a load fills `t` in place. Throws ShardingError where sums over
/// ranks are still to be reduced.
Piece piece_of(std::string name, const Tensor& t);

}  // namespace tessera::checkpoint
