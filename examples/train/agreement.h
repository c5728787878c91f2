// What ranks must have alike, compared: program and options before anything else, then what was
// read, then the bits of what several ranks hold, before the first step, before each save and after
// the last step. Invariant: where ranks differ, all of them throw the same error, before a step is
// taken with it or a save is begun.
#pragma once
#include <cstdint>
#include <span>
#include <string>

#include "collectives/process_group.h"
#include "examples/train/options.h"
#include "examples/train/task.h"
#include "parallel/checkpoint/piece.h"

namespace tessera::train {

/// All ranks throw it with the same text, so one of them has to tell it.
class RanksDisagree : public UserError {
 public:
  using UserError::UserError;
};

class Agreement {
 public:
  /// Compares program and options. All ranks make one; throws RanksDisagree.
  Agreement(const Options& options, Ref<ProcessGroup> group);
  /// Compares what `task` was made of: data, vocabulary, options of the model, weights. Returns it.
  Task on(Task task);
  /// Compares the replicas among `pieces`, which are the same on each rank at each call. `done`
  /// steps are taken; the same state is not compared twice. A save may copy them meanwhile.
  void on_replicas(std::span<const checkpoint::Piece> pieces, int64_t done);
  /// What all that took, for the user; empty on one rank.
  std::string story() const;

 private:
  class Timed;
  const Options& o_;
  Ref<ProcessGroup> group_;
  double seconds_ = 0;
  int times_ = 0;          // that replicas were compared
  int64_t compared_ = -1;  // after this many steps, the last time
  uint64_t bytes_ = 0;     // of this rank that others hold, too
};

}  // namespace tessera::train
