// SIGINT and SIGTERM as a wish to end at the next step. Invariant: all ranks end after the same
// step, whichever of them were sent the signal, and when.
#pragma once
#include <signal.h>

#include "collectives/process_group.h"

namespace tessera::train {

inline constexpr int kStopSignals = 2;

class StopSignals {
 public:
  /// Catches both, unless they are ignored, while it lives; one that comes more than a second after
  /// the first ends the process as if neither were caught. `active` false: catches none.
  explicit StopSignals(bool active);
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  /// The signal that a rank of `group` was sent, 0 for none; the same on all ranks, which all call
  /// it.
  int agreed(ProcessGroup& group) const;

 private:
  const bool active_;
  struct sigaction before_[kStopSignals] = {};
};

}  // namespace tessera::train
