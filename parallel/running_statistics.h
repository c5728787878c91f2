// Running statistics (batch-norm's means and variances) of a data-parallel model. Each micro-batch
// is normalised by its own statistics, but inference needs one set of values. Each micro-batch by
// itself would turn the values before a step into new ones. Invariant: after the step every rank
// holds the mean of these new values over the micro-batches of all ranks. So one rank with one
// micro-batch gets the usual values, those of batch-norm without parallelism. Where micro-batches
// are summed in a balanced tree (their number is a power of two), the bits of these means do not
// depend on how the micro-batches are distributed over ranks.
// Internal: not part of the public interface.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "collectives/process_group.h"
#include "core/nn/module.h"

namespace tessera::parallel {

class RunningStatistics {
 public:
  /// Manages the persistent float buffers of `model` that a forward writes (or this rank's pieces
  /// of those that are cut over other axes) and the integer buffers beside them, which count a step
  /// once. `groups`: the ranks, or the ranks along each of several axes in the order of summation.
  /// `accumulate_first`: whether sums are over the micro-batches of a rank and then over ranks
  /// (data::Deal::kAccumulateThenReduce), as for gradients, or the other way round. All ranks must
  /// have equally many micro-batches. The model must outlive this object.
  RunningStatistics(nn::Module& model, std::vector<Ref<ProcessGroup>> groups,
                    bool accumulate_first);
  RunningStatistics(nn::Module& model, Ref<ProcessGroup> group, bool accumulate_first)
      : RunningStatistics(model, std::vector<Ref<ProcessGroup>>{std::move(group)},
                          accumulate_first) {}

  /// Calls before() and after() around every training forward of `model` from now on. Forwards
  /// while `last` is false are micro-batches of a step, which ends with the first forward while it
  /// is true. Returns null where the model has no such buffers.
  static std::shared_ptr<RunningStatistics> attach(nn::Module& model,
                                                   std::vector<Ref<ProcessGroup>> groups,
                                                   bool accumulate_first,
                                                   std::function<bool()> last);

  /// Must be called before and after the forward of micro-batch `k` of `count`. The last after()
  /// communicates.
  void before(size_t k, size_t count);
  void after(size_t k, size_t count);
  /// Forgets the micro-batches of a step that will not be finished.
  void start_over();
  /// Leaves the buffers alone from now on, for a step that is repeated only to be inspected.
  void stop() { means_.clear(), counts_.clear(); }

 private:
  struct Buffer {
    Tensor* slot;               // of the model
    uint32_t version = 0;       // before the step
    uint32_t made_version = 0;  // after the step's latest micro-batch
    bool written = true;        // the step's first forward wrote it
  };
  void before_forward(bool last);
  void after_forward(bool last);
  Tensor packed() const;
  void unpack(const Tensor& values);
  Tensor reduced(Tensor sum) const;

  std::vector<Buffer> means_;    // the float buffers
  std::vector<Tensor*> counts_;  // the integer buffers: each step adds one
  std::vector<Ref<ProcessGroup>> groups_;
  int ranks_ = 1;
  bool accumulate_first_;
  Tensor start_;                      // values before the step
  std::vector<Tensor> counts_start_;  // counts_ before the step
  std::vector<Tensor> made_;          // values after each micro-batch
};

}  // namespace tessera::parallel
