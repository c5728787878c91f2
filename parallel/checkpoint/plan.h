// Who writes what. Rank 0 collects the descriptions of all pieces, checks that they partition every
// tensor, and deals each box to one of the ranks that hold it. Invariant: the deal depends on the
// descriptions alone, and no rank gets more than it must: largest boxes first, each to the rank
// with the fewest bytes so far.
#pragma once
#include "parallel/checkpoint/exchange.h"
#include "parallel/checkpoint/manifest.h"

namespace tessera::checkpoint {

struct Plan {
  std::string description;   // of this rank's pieces; a plan serves as long as it is the same
  std::vector<size_t> mine;  // pieces this rank writes, in the order of its file
  uint64_t bytes = 0;        // of those
  std::vector<TensorEntry> tensors;  // on rank 0: all of them, without chunks
};

/// A text that is equal for equal names, dtypes, shapes and boxes. Throws UserError, naming the
/// piece, for one that cannot be saved.
std::string describe_pieces(std::span<const Piece> pieces);

/// All ranks call it with their own description and pieces. Throws UserError on every rank where
/// pieces disagree, leave a gap or overlap without being equal.
Plan make_plan(Exchange& exchange, std::string description, std::span<const Piece> pieces);

}  // namespace tessera::checkpoint
