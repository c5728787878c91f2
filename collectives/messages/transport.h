// What moves bytes between pairs of ranks for the message engine: TCP by Gloo, or MPI.
#pragma once
#include <span>
#include <string_view>

#include "collectives/messages/watch.h"

namespace tessera::detail {

/// One buffer on its way to or from a rank of the group.
struct Transfer {
  int peer;
  void* data;
  int64_t bytes;
  bool sends;
};

/// Parts of a call, in their order.
enum class Step : uint8_t { kHeaders, kSplits, kPieces, kGather };
/// Which of the messages between two ranks: of collective `number`, or of the send or receive of
/// that number between the two.
struct Slot {
  uint64_t number;
  Step step;
  bool p2p;
};

class Transport {
 public:
  virtual ~Transport() = default;
  /// The backend's name.
  virtual std::string_view name() const = 0;
  /// Moves all `transfers` at once and returns when they are done. A wait that `watch` ends, or a
  /// peer that is gone, becomes watch.explain(). Threads may be inside together, with other slots.
  virtual void exchange(const Call& call, std::span<const Transfer> transfers, Slot slot,
                        Watch& watch) = 0;
  /// Ends what is under way; peers that wait for this rank notice.
  virtual void close() = 0;
};

}  // namespace tessera::detail
