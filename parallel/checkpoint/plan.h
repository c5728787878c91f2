// Decides which rank writes which piece. Rank 0 collects the descriptions of all pieces, checks
// that they partition every tensor, and assigns each box to one of the ranks that hold it: largest
// boxes first, each to the rank with the fewest bytes so far. Invariant: the assignment depends
// only on the descriptions.
#pragma once
#include "parallel/checkpoint/exchange.h"
#include "parallel/checkpoint/manifest.h"

namespace tessera::checkpoint {

struct Plan {
  std::string description;   // of this rank's pieces; the plan is valid while it does not change
  std::vector<size_t> mine;  // pieces this rank writes, in the order of its file
  uint64_t bytes = 0;        // of those
  std::vector<TensorEntry> tensors;  // on rank 0: all tensors, without chunks
};

/// Returns a text that is equal for equal names, dtypes, shapes and boxes. Throws UserError that
/// names a piece which cannot be saved.
std::string describe_pieces(std::span<const Piece> pieces);

/// Makes the plan. All ranks must call it with their own description and pieces. Throws UserError
/// on every rank where pieces disagree, leave a gap, or overlap without being equal.
Plan make_plan(Exchange& exchange, std::string description, std::span<const Piece> pieces);

}  // namespace tessera::checkpoint
