// The common interface of ddp and fully_shard. Each attaches to a model, which keeps it alive, so a
// program may drop the handle it gets. Invariant: where backwards reduce gradients, training
// forwards reduce running statistics (batch-norm's), so all ranks have the same values after a
// step.
// Internal: not part of the public interface.
#pragma once
#include <memory>

#include "parallel/running_statistics.h"

namespace tessera::parallel {

class DataParallel {
 public:
  virtual ~DataParallel() = default;
  DataParallel(const DataParallel&) = delete;
  DataParallel& operator=(const DataParallel&) = delete;

  /// While sync is off, gradients of backwards stay on this rank and accumulate, and forwards count
  /// as micro-batches of one step, whose last micro-batch runs with sync on again.
  virtual void set_sync(bool sync) = 0;
  virtual bool sync() const = 0;
  /// How long collectives were executing since the last call, waits for peers included; 0 with one
  /// rank. Waits for collectives in progress on the CPU; those of a device count at a later call.
  virtual double communication_ms() = 0;
  /// Stops synchronising running statistics: each rank keeps its own from now on.
  void leave_buffers() {
    if (statistics_) statistics_->stop();
  }

  /// A scope in which backwards accumulate without communication.
  class NoSync {
   public:
    explicit NoSync(DataParallel& of, bool off = true) : of_(of), old_(of.sync()) {
      if (off) of_.set_sync(false);
    }
    ~NoSync() {
      if (of_.sync() != old_) of_.set_sync(old_);
    }
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    DataParallel& of_;
    bool old_;
  };
  /// `off` false changes nothing, so that a loop can write
  ///   for (k ...) { auto scope = ddp->no_sync(k + 1 < accumulate); ... }
  [[nodiscard]] NoSync no_sync(bool off = true) { return NoSync(*this, off); }

 protected:
  DataParallel() = default;
  std::shared_ptr<RunningStatistics> statistics_;  // null: buffers are not synchronised
};

}  // namespace tessera::parallel
