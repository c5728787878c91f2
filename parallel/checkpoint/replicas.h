// Replicas compared. Two ranks hold a replica where they hold the same box of the same tensor; that
// follows from what a rank says of its pieces, whatever the strategy, so it needs no list of what
// is replicated. Invariant: all ranks get the same answer.
#pragma once
#include <optional>
#include <span>
#include <string>

#include "collectives/process_group.h"
#include "parallel/checkpoint/piece.h"

namespace tessera::checkpoint {

/// Nothing where all replicas among the pieces of all ranks have equal bits; else the first piece
/// that has not, by the order of the lowest rank that holds one, with who holds what: "model.w:
/// rank 0 has xxh128 ..., ranks 1, 2 have ...". All ranks of `group` call it. Each hashes its own
/// pieces, at the speed of memory; ranks exchange 32 bytes for each.
std::optional<std::string> differing_replica(std::span<const Piece> pieces, ProcessGroup& group);

/// "rank 0 has A, ranks 1, 2 have B": who says what, by the first to say it. `said[r]` is rank r's;
/// ranks without one are left out.
std::string who_has_what(std::span<const std::optional<std::string>> said);

}  // namespace tessera::checkpoint
