// Saving. A save is one immutable folder per step, committed by one rename once every rank's file
// is on disk; then it is read back, `latest` is swapped, and only then older steps go. By default
// save() only marks what this rank writes as being read (snapshot.h); a writer thread with a
// process group of its own copies it while training goes on, and does the rest. Invariant: whatever
// fails, wherever a process is killed, the newest complete step stays loadable and training may go
// on.
#pragma once
#include <memory>
#include <span>
#include <string>

#include "collectives/process_group.h"
#include "parallel/checkpoint/manifest.h"

namespace tessera::checkpoint {

struct SaveOptions {
  int keep = 0;              // newest steps that stay; 0: all
  bool async = true;         // false: save() returns when the step is committed
  bool lazy = true;          // false: save() returns when all is copied
  size_t staging_bytes = 0;  // most memory of the staging buffer; 0: as much as this rank writes
  uint64_t block_bytes = kBlockBytes;  // a hash each
  // How long a rank may stand still in a save (no bytes written or read, no answer to its peers)
  // before it is given up; 0: the deadline of the group's calls.
  Millis timeout{0};
};

/// What a finished save cost this rank.
struct SaveCost {
  int64_t step = -1;
  uint64_t bytes = 0;          // of tensors that this rank wrote
  double blocked_seconds = 0;  // in save(), and held_up_seconds
  double held_up_seconds = 0;  // later writes to what was saved, waiting for its copy or making it
  double seconds = 0;          // until committed, read back and pruned
  double writer_cpu_seconds = 0;  // processor time of the writer thread: taken from training where
                                  // a rank has no core to spare
};

class Checkpointer {
 public:
  /// Creates `folder` where missing and takes it for this job. All ranks of `group` (null: the
  /// world; one rank of several alone: solo_group()) call it. Throws UserError on all ranks when
  /// the folder cannot be made or another job saves into it.
  Checkpointer(std::string folder, ProcessGroup* group = nullptr, const SaveOptions& options = {});
  /// Waits for a save under way; its error, if nobody asked, is logged. A writer that stands still
  /// for longer than the timeout is left behind, which is logged.
  ~Checkpointer();

  /// Does once what a first save() with these pieces would: agrees who writes what and allocates
  /// the staging buffer. Throws UserError on all ranks when no file can be made in the folder. All
  /// ranks call it, or none.
  void prepare(std::span<const Piece> pieces);
  /// Saves `state` as step `step`, which must be beyond the newest saved one. All ranks call it,
  /// each with its own pieces and with equal extra (rank 0's counts). The pieces may change once it
  /// returns, by ops, by collectives and through pointers that are asked for then (Tensor::data):
  /// who overwrites one that is not copied yet copies it first. Only a pointer that a program has
  /// kept from before guards nothing: use `lazy = false` with those. When the save before is still
  /// under way, waits for it. Throws UserError (on all ranks) for pieces that cannot be saved, for
  /// what the save before failed with (then nothing new was begun), and, when not asynchronous, for
  /// this save's own failures; CommError when a peer was lost or the deadline passed.
  void save(int64_t step, const State& state);
  /// Waits until no save is under way and throws what the last one failed with, once.
  void wait();
  const std::string& folder() const;
  /// Of the last finished save.
  SaveCost last() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::checkpoint
