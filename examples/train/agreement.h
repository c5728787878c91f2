// Compares what must be equal on all ranks: program and options first, then what was read, then the
// bits of what several ranks hold, before the first step, before each save and after the last step.
// Invariant: where ranks differ, all of them throw the same error, before a step is taken or a save
// is begun with the difference.
#pragma once
#include <cstdint>
#include <span>
#include <string>

#include "collectives/process_group.h"
#include "examples/train/options.h"
#include "examples/train/task.h"
#include "parallel/checkpoint/piece.h"

namespace tessera::train {

/// All ranks throw it with the same text, so only one of them has to print it.
class RanksDisagree : public UserError {
 public:
  using UserError::UserError;
};

class Agreement {
 public:
  /// Compares program and options. All ranks must make one; throws RanksDisagree.
  Agreement(const Options& options, Ref<ProcessGroup> group);
  /// Compares what `task` was made of (data, vocabulary, options of the model, weights) and returns
  /// it.
  Task on(Task task);
  /// Compares the replicas among `pieces`, which must be the same at each call on a rank. `done` is
  /// the number of steps taken; the state after the same number is not compared twice. A save may
  /// copy the pieces meanwhile.
  void on_replicas(std::span<const checkpoint::Piece> pieces, int64_t done);
  /// Describes for the user how long all comparisons took; empty on one rank.
  std::string story() const;

 private:
  class Timed;
  const Options& o_;
  Ref<ProcessGroup> group_;
  double seconds_ = 0;
  int times_ = 0;          // how often replicas were compared
  int64_t compared_ = -1;  // number of steps at the last comparison
  uint64_t bytes_ = 0;     // bytes on this rank that other ranks hold too
};

}  // namespace tessera::train
