// Running statistics (batch-norm's means and variances) of a data-parallel model. Each micro-batch
// is normalised by its own statistics; what inference uses must be one set of values. Invariant:
// after a step every rank holds the mean, over the step's micro-batches of all ranks, of what each
// would have made of the values before the step. So one rank with one micro-batch has the plain
// values, and where the sum over micro-batches is the balanced tree (a power of two of them), the
// bits do not depend on how they are spread over ranks.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "collectives/process_group.h"
#include "core/nn/module.h"

namespace tessera::parallel {

class RunningStatistics {
 public:
  /// Persistent float buffers of `model` that a forward writes; of those that are cut over other
  /// axes, this rank's pieces. Integer ones beside them count a step once. `groups`: the ranks, or
  /// those along each of several axes in the order of summation. `accumulate_first`: as gradients
  /// are summed, over the micro-batches of a rank and then over ranks
  /// (data::Deal::kAccumulateThenReduce), or the other way. All ranks take equally many
  /// micro-batches. The model must outlive this.
  RunningStatistics(nn::Module& model, std::vector<Ref<ProcessGroup>> groups,
                    bool accumulate_first);
  RunningStatistics(nn::Module& model, Ref<ProcessGroup> group, bool accumulate_first)
      : RunningStatistics(model, std::vector<Ref<ProcessGroup>>{std::move(group)},
                          accumulate_first) {}

  /// Does what before() and after() do around every training forward of `model` from now on. A
  /// forward while `last` is false is one of several micro-batches of a step, which ends with the
  /// first forward while it is true. Null where the model has no such buffers.
  static std::shared_ptr<RunningStatistics> attach(nn::Module& model,
                                                   std::vector<Ref<ProcessGroup>> groups,
                                                   bool accumulate_first,
                                                   std::function<bool()> last);

  /// Around the forward of micro-batch `k` of `count`: before, and after. The last after()
  /// communicates.
  void before(size_t k, size_t count);
  void after(size_t k, size_t count);
  /// Forgets the micro-batches of a step that was begun and will not be finished.
  void start_over();
  /// Leaves the buffers alone from now on: for a step that is run again only to be looked at.
  void stop() { means_.clear(), counts_.clear(); }

 private:
  struct Buffer {
    Tensor* slot;               // of the model
    uint32_t version = 0;       // before the step
    uint32_t made_version = 0;  // after its latest micro-batch
    bool written = true;        // by the step's first forward
  };
  void before_forward(bool last);
  void after_forward(bool last);
  Tensor packed() const;
  void unpack(const Tensor& values);
  Tensor reduced(Tensor sum) const;

  std::vector<Buffer> means_;    // the float buffers
  std::vector<Tensor*> counts_;  // the others: a step counts once
  std::vector<Ref<ProcessGroup>> groups_;
  int ranks_ = 1;
  bool accumulate_first_;
  Tensor start_;                      // values before the step
  std::vector<Tensor> counts_start_;  // the same of counts_
  std::vector<Tensor> made_;          // by each micro-batch
};

}  // namespace tessera::parallel
