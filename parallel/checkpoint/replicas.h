// Replicas compared. Two ranks hold a replica where they hold the same box of the same tensor; that
// follows from what a rank says of its pieces, whatever the strategy, so it needs no list of what
// is replicated. Invariant: all ranks get the same answer.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "collectives/process_group.h"
#include "parallel/checkpoint/piece.h"

namespace tessera::checkpoint {

struct ReplicasCompared {
  /// Nothing where all replicas among the pieces of all ranks have equal bits; else the first piece
  /// that has not, by the order of the lowest rank that holds one, with who holds what: "model.w:
  /// rank 0 has xxh128 ..., ranks 1, 2 have ...".
  std::optional<std::string> difference;
  uint64_t bytes = 0;  // of this rank's pieces, that another rank holds too
};

/// All ranks of `group` call it. Ranks tell each other which pieces they hold, 16 bytes for each;
/// a rank hashes those that another one holds too, at the speed of memory, and tells the hashes.
ReplicasCompared compare_replicas(std::span<const Piece> pieces, ProcessGroup& group);

/// "rank 0 has A, ranks 1, 2 have B": who says what, by the first to say it. `said[r]` is rank r's;
/// ranks without one are left out.
std::string who_has_what(std::span<const std::optional<std::string>> said);

}  // namespace tessera::checkpoint
