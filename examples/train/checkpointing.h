// Saves and resumes a run: model, optimizer, random state, position in the data and the run's
// options. Invariant: a run that was killed and resumed takes the steps that it would have taken
// undisturbed.
#pragma once
#include <memory>
#include <string>

#include "core/data/loader.h"
#include "core/optim/grad_scaler.h"
#include "core/optim/optimizer.h"
#include "examples/train/agreement.h"
#include "examples/train/options.h"
#include "examples/train/task.h"
#include "parallel/checkpoint/training_state.h"

namespace tessera::train {

class Checkpointing {
 public:
  /// Opens --checkpoint, if it is given. Throws UserError when the folder holds saved steps and
  /// --resume was not given: two runs would mix in it.
  Checkpointing(const Options& options, const Task& task, ProcessGroup& group,
                optim::Optimizer& optimizer, optim::GradScaler& scaler, data::DataLoader& loader,
                Agreement& agreement);

  /// Restores the newest saved step if --resume is given and there is one. Returns the number of
  /// steps that are done.
  int64_t resume();
  /// Compares the replicas of model, optimizer and loss scale on all ranks, with or without
  /// --checkpoint. Throws RanksDisagree.
  void compare_replicas(int64_t done);
  /// Describes for the user what resume() did; may be empty.
  const std::string& story() const { return story_; }
  /// Begins a save if one is due after `done` steps; the run goes on meanwhile. Returns a warning
  /// with the reason if the save before failed (older saves are unchanged), else nothing. Throws
  /// CommError, and RanksDisagree where replicas differ, before anything is saved.
  std::string after_step(int64_t done);
  /// Saves the end of the run unless it is saved already, and waits. Throws UserError if that
  /// failed; returns a warning if the save before did.
  std::string finish(int64_t done);

 private:
  checkpoint::TrainingState training() const;
  std::string differing_options(const checkpoint::Extra& saved) const;
  const Options& o_;
  const Task& task_;
  ProcessGroup& group_;
  optim::Optimizer& optimizer_;
  optim::GradScaler& scaler_;
  data::DataLoader& loader_;
  Agreement& agreement_;
  std::unique_ptr<checkpoint::Checkpointer> saver_;  // null: nothing is saved
  int64_t saved_ = -1;                               // the step of the last save that was begun
  std::string story_;
};

}  // namespace tessera::train
