// What ddp and fully_shard have in common: each attaches to a model, which keeps it alive, so a
// program may drop the handle that it is given. Invariant: where backwards reduce, so do training
// forwards with running statistics (batch-norm's): all ranks have the same values after a step.
#pragma once
#include <memory>

#include "parallel/running_statistics.h"

namespace tessera::parallel {

class DataParallel {
 public:
  virtual ~DataParallel() = default;
  DataParallel(const DataParallel&) = delete;
  DataParallel& operator=(const DataParallel&) = delete;

  /// Gradients of the next backwards stay on this rank and accumulate. Forwards meanwhile are of
  /// micro-batches of a step, the last of which runs with sync on again.
  virtual void set_sync(bool sync) = 0;
  virtual bool sync() const = 0;
  /// How long collectives were executing since this was last asked, waiting for peers included; 0
  /// with one rank. Waits for them.
  virtual double communication_ms() = 0;
  /// Running statistics are this rank's own from now on.
  void leave_buffers() {
    if (statistics_) statistics_->stop();
  }

  /// Backwards inside the scope accumulate without communication.
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
  /// `off` false changes nothing: for (k ...) { auto scope = ddp->no_sync(k + 1 < accumulate); ...
  /// }
  [[nodiscard]] NoSync no_sync(bool off = true) { return NoSync(*this, off); }

 protected:
  DataParallel() = default;
  std::shared_ptr<RunningStatistics> statistics_;  // null: buffers are left alone
};

}  // namespace tessera::parallel
