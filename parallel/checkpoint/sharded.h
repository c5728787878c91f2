// Between sharded tensors and pieces: the one place where checkpoints meet layouts.
#pragma once
#include "dtensor/dtensor.h"
#include "parallel/checkpoint/piece.h"

namespace tessera::checkpoint {

/// What this rank holds of `t`, plain (a whole tensor) or sharded; `values` shares its memory, so a
/// load fills `t` in place. Throws ShardingError for a sum that is still to be reduced.
Piece piece_of(std::string name, const Tensor& t);

}  // namespace tessera::checkpoint
