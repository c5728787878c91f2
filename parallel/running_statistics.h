// Running statistics (batch-norm's means and variances) of a data-parallel model. Each micro-batch
// is normalised by its own statistics; what inference uses must be one set of values. Invariant:
// after a step every rank holds the mean, over the step's micro-batches of all ranks, of what each
// would have made of the values before the step. So one rank with one micro-batch has the plain
// values, and where the sum over micro-batches is the balanced tree (a power of two of them), the
// bits do not depend on how they are spread over ranks.
#pragma once
#include <vector>

#include "collectives/process_group.h"
#include "core/nn/module.h"

namespace tessera::parallel {

class RunningStatistics {
 public:
  /// The float buffers of `model`, all of one dtype; of those that are cut over other axes, this
  /// rank's pieces. `accumulate_first`: as gradients are summed, over the micro-batches of a rank
  /// and then over ranks (data::Deal::kAccumulateThenReduce), or the other way. All ranks of
  /// `group` take equally many micro-batches.
  RunningStatistics(nn::Module& model, Ref<ProcessGroup> group, bool accumulate_first);

  /// Around the forward of micro-batch `k` of `count`: before, and after. The last after()
  /// communicates.
  void before(size_t k, size_t count);
  void after(size_t k, size_t count);
  /// Leaves the buffers alone from now on: for a step that is run again only to be looked at.
  void stop() { means_.clear(), counts_.clear(); }

 private:
  bool idle(size_t count) const { return means_.empty() || (count == 1 && group_->size() == 1); }
  Tensor packed() const;
  void unpack(const Tensor& values);
  std::vector<Tensor> means_;   // the float buffers
  std::vector<Tensor> counts_;  // the others: a step counts once
  Ref<ProcessGroup> group_;
  bool accumulate_first_;
  Tensor start_;                      // values before the step
  std::vector<Tensor> counts_start_;  // the same of counts_
  std::vector<Tensor> made_;          // by each micro-batch
};

}  // namespace tessera::parallel
