// Compares replicas. Two ranks hold a replica where they hold the same box of the same tensor. This
// follows from the ranks' descriptions of their pieces, whatever the strategy, so no list of
// replicated tensors is needed. Invariant: all ranks get the same answer.
#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "collectives/process_group.h"
#include "parallel/checkpoint/piece.h"

namespace tessera::checkpoint {

struct ReplicasCompared {
  /// Nothing where all replicas among the pieces of all ranks have equal bits. Else the first piece
  /// that differs, by the order of the lowest rank that holds one, and what each rank holds:
  /// "model.w: rank 0 has xxh128 ..., ranks 1, 2 have ..."; bits_hash where one is on a card.
  std::optional<std::string> difference;
  uint64_t bytes = 0;  // of this rank's pieces that another rank holds too
};

/// Compares the replicas among `pieces`; all ranks of `group` must call it. Ranks exchange 24 bytes
/// for each piece that they hold; a rank then hashes those that another rank holds too, at the
/// speed of memory, and exchanges the hashes. A piece that a rank holds on a card is hashed where
/// it is, on all ranks by bits_hash (core/ops/bits_hash.h): 16 bytes of it come to the host.
ReplicasCompared compare_replicas(std::span<const Piece> pieces, ProcessGroup& group);

/// Returns "rank 0 has A, ranks 1, 2 have B": each text with the ranks that have it, in the order
/// of their lowest ranks. `said[r]` is the text of rank r; ranks without one are left out.
std::string who_has_what(std::span<const std::optional<std::string>> said);

}  // namespace tessera::checkpoint
