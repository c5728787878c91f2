// The interface that moves bytes between pairs of ranks for the message engine: TCP by Gloo, or
// MPI.
#pragma once
#include <span>
#include <string_view>

#include "collectives/messages/watch.h"

namespace tessera::detail {

/// One buffer to send to a rank of the group or to receive from it.
struct Transfer {
  int peer;
  void* data;
  int64_t bytes;
  bool sends;
};

/// The parts of a call, in order.
enum class Step : uint8_t { kHeaders, kSplits, kPieces, kGather };
/// Identifies a message between two ranks: it belongs to collective `number`, or to the send or
/// receive of that number between the two.
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
  /// Moves all `transfers` at once and returns when they are done. Where `watch` ends a wait, or a
  /// peer is gone, throws what watch.explain() throws. Several threads may call it at a time, with
  /// different slots.
  virtual void exchange(const Call& call, std::span<const Transfer> transfers, Slot slot,
                        Watch& watch) = 0;
  /// Ends transfers in progress; peers that wait for this rank notice.
  virtual void close() = 0;
};

}  // namespace tessera::detail
