// Saving. A save is one immutable folder per step, committed by one rename once every rank's file
// is on disk; then it is read back, `latest` is swapped, and only then older steps go. By default
// the training thread only copies what this rank writes into a bounded staging buffer, and a writer
// thread with a process group of its own does the rest. Invariant: whatever fails, wherever a
// process is killed, the newest complete step stays loadable and training may go on.
#pragma once
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "parallel/checkpoint/folder.h"
#include "parallel/checkpoint/plan.h"
#include "parallel/checkpoint/staging.h"

namespace tessera::checkpoint {

struct SaveOptions {
  int keep = 0;              // newest steps that stay; 0: all
  bool async = true;         // false: save() returns when the step is committed
  size_t staging_bytes = 0;  // most memory of the staging buffer; 0: as much as this rank writes
  uint64_t block_bytes = kBlockBytes;  // a hash each
  Millis timeout{1'800'000};           // for all of one save
};

/// What a finished save cost this rank.
struct SaveCost {
  int64_t step = -1;
  uint64_t bytes = 0;             // of tensors that this rank wrote
  double blocked_seconds = 0;     // the training thread, in save()
  double seconds = 0;             // until committed, read back and pruned
  double writer_cpu_seconds = 0;  // processor time of the writer thread: taken from training where
                                  // a rank has no core to spare
};

class Checkpointer {
 public:
  /// Creates `folder` where missing and takes it for this job. All ranks of `group` (null: one
  /// rank) call it. Throws UserError on all ranks when the folder cannot be made or another job
  /// saves into it.
  Checkpointer(std::string folder, ProcessGroup* group = nullptr, const SaveOptions& options = {});
  /// Waits for a save under way; its error, if nobody asked, is logged.
  ~Checkpointer();
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  /// Does once what a first save() with these pieces would: agrees who writes what and allocates
  /// the staging buffer. All ranks call it, or none.
  void prepare(std::span<const Piece> pieces);
  /// Saves `state` as step `step`, which must be beyond the newest saved one. All ranks call it,
  /// each with its own pieces and with equal extra (rank 0's counts). The pieces may change once it
  /// returns. When the save before is still under way, waits for it. Throws UserError (on all
  /// ranks) for pieces that cannot be saved, for what the save before failed with (then nothing new
  /// was begun), and, when not asynchronous, for this save's own failures; CommError when a peer
  /// was lost or the deadline passed.
  void save(int64_t step, const State& state);
  /// Waits until no save is under way and throws what the last one failed with, once.
  void wait();
  const std::string& folder() const { return folder_; }
  /// Of the last finished save.
  SaveCost last() const;

 private:
  struct Job;
  void plan_for(std::span<const Piece> pieces);
  void stage(int64_t step, const State& state, Staging::Clock::time_point deadline);
  void start_writer(std::unique_ptr<Job> job);
  void run_writer();
  void write(Job& job);
  std::string write_rank_file(const Job& job, const std::string& temporary);
  void commit(const Job& job, const std::string& temporary,
              const std::vector<std::string>& written);
  void read_back(const Job& job);
  void publish(const Job& job);
  void discard(const Job& job, bool committed);

  std::string folder_;
  SaveOptions options_;
  Ref<ProcessGroup> group_;  // of the writer thread while a save is under way, else of the caller
  Exchange exchange_;
  std::optional<FolderLock> lock_;  // on rank 0
  std::optional<Plan> plan_;
  Staging staging_;
  Pages window_;  // what is read back

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::unique_ptr<Job> job_;  // under way
  std::exception_ptr error_;  // of the last one, until somebody asked
  SaveCost last_;
  bool noted_ = false;  // that the disk is written to through the page cache
  bool stop_ = false;
  std::thread writer_;
};

}  // namespace tessera::checkpoint
