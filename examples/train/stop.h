// Makes SIGINT and SIGTERM end a run at the next step. Invariant: all ranks end after the same
// step, whichever of them got the signal, and when.
#pragma once
#include <signal.h>

#include "collectives/process_group.h"

namespace tessera::train {

inline constexpr int kStopSignals = 2;

class StopSignals {
 public:
  /// While this object lives, a run that `saves` catches both signals, unless they are ignored; a
  /// second one more than a second after the first ends the process as if they were not caught. In
  /// other runs SIGINT ends the process at once, as usual; the rank that `tells` then prints that
  /// no step was saved, and how to save.
  StopSignals(bool saves, bool tells);
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  /// Returns the signal that a rank of `group` got, 0 for none; the same on all ranks. All ranks
  /// must call it.
  int agreed(ProcessGroup& group) const;

 private:
  const bool saves_;
  struct sigaction before_[kStopSignals] = {};
};

}  // namespace tessera::train
