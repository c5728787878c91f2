// Saves checkpoints. A save is one immutable folder per step, which is committed by a rename once
// every rank's file is on disk. It is then read back, `latest` is swapped, and only after that
// older steps are removed. By default save() only marks the tensors that this rank is to write
// (snapshot.h). A writer thread with a process group of its own copies them while training goes on,
// and does the rest. Invariant: whatever fails, and wherever a process is killed, the newest
// complete step stays loadable and training may go on.
#pragma once
#include <memory>
#include <span>
#include <string>

#include "collectives/process_group.h"
#include "parallel/checkpoint/manifest.h"

namespace tessera::checkpoint {

struct SaveOptions {
  int keep = 0;              // number of newest steps that stay; 0: all
  bool async = true;         // false: save() returns when the step is committed
  bool lazy = true;          // false: save() returns when everything is copied
  size_t staging_bytes = 0;  // largest size of the staging buffer; 0: as much as this rank writes
  uint64_t block_bytes = kBlockBytes;  // each block has a hash
  // How long a rank may make no progress in a save (no bytes written or read, no answer to its
  // peers) before the save fails; 0: the deadline of the group's calls.
  Millis timeout{0};
};

/// The cost of a finished save on this rank.
struct SaveCost {
  int64_t step = -1;
  uint64_t bytes = 0;          // of tensors that this rank wrote
  double blocked_seconds = 0;  // time in save(), plus held_up_seconds
  // Time that later writes to the saved tensors waited for the copy, or made it.
  double held_up_seconds = 0;
  double seconds = 0;             // until committed, read back and pruned
  double writer_cpu_seconds = 0;  // processor time of the writer thread: taken from training where
                                  // a rank has no core to spare
};

class Checkpointer {
 public:
  /// Creates `folder` if it does not exist and locks it for this job. All ranks of `group` (null:
  /// the world; for one rank of several alone: solo_group()) must call it. Throws UserError on all
  /// ranks when the folder cannot be made or another job saves into it.
  Checkpointer(std::string folder, ProcessGroup* group = nullptr, const SaveOptions& options = {});
  /// Waits for a save in progress; if its error was not thrown yet, logs it. If the writer makes no
  /// progress for longer than the timeout, it is abandoned, which is logged.
  ~Checkpointer();

  /// Does in advance what a first save() with these pieces would do once: agrees which rank writes
  /// which piece and allocates the staging buffer. Throws UserError on all ranks when no file can
  /// be made in the folder. Either all ranks call it or none.
  void prepare(std::span<const Piece> pieces);
  /// Saves `state` as step `step`, which must be beyond the newest saved one. All ranks call it,
  /// each with its own pieces and with equal extra (rank 0's is saved). Once it returns, the pieces
  /// may change: by ops, by collectives and through pointers obtained after that (Tensor::data). A
  /// thread that overwrites a piece which is not copied yet copies it first. Only writes through a
  /// pointer that a program has kept from before are not seen: use `lazy = false` with those. Waits
  /// if the save before is still in progress. Throws UserError (on all ranks) for pieces that
  /// cannot be saved, for the error of the save before (then nothing new was begun) and, when not
  /// asynchronous, for errors of this save; throws CommError when a peer was lost or the deadline
  /// passed.
  void save(int64_t step, const State& state);
  /// Waits until no save is in progress and throws the error of the last one, once.
  void wait();
  const std::string& folder() const;
  /// The cost of the last finished save.
  SaveCost last() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::checkpoint
