// SIGINT and SIGTERM as a wish to end at the next step. Invariant: all ranks end after the same
// step, whichever of them were sent the signal, and when.
#pragma once
#include <signal.h>

#include "collectives/process_group.h"

namespace tessera::train {

inline constexpr int kStopSignals = 2;

class StopSignals {
 public:
  /// While it lives, a run that `saves` catches both, unless they are ignored; one that comes more
  /// than a second after the first ends the process as if neither were caught. SIGINT ends another
  /// run at once, as ever, with a line from the rank that `tells`: no step is saved, and how to
  /// have one.
  StopSignals(bool saves, bool tells);
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  /// The signal that a rank of `group` was sent, 0 for none; the same on all ranks, which all call
  /// it.
  int agreed(ProcessGroup& group) const;

 private:
  const bool saves_;
  struct sigaction before_[kStopSignals] = {};
};

}  // namespace tessera::train
