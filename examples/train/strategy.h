// How a run is distributed over ranks: --strategy and --mesh. A strategy makes the model parallel
// and says which ranks share a batch. Invariant: the samples of a step, and the tree in which their
// gradients are summed under --deterministic, do not depend on the strategy.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "collectives/process_group.h"
#include "core/data/sampler.h"
#include "core/optim/optim.h"
#include "examples/train/options.h"
#include "examples/train/task.h"
#include "parallel/running_statistics.h"

namespace tessera::train {

/// The evaluation of one batch.
struct Evaluation {
  double loss = 0;                 // the mean over samples that count
  int64_t counted = 0, right = 0;  // samples; right: correct ones, if the task classifies
};

class Strategy {
 public:
  virtual ~Strategy() = default;
  /// The ranks that each take a part of a batch. Ranks with other coordinates on the other axes
  /// have groups of their own.
  ProcessGroup& data_group() const { return *data_group_; }
  virtual data::Deal deal() const { return data::Deal::kAccumulateThenReduce; }

  /// Runs forward and backward of this rank's micro-batches of a step; each draws its dropout keys
  /// from number `key` (i64 []) on. Returns the mean loss of each, in f64. Gradients are those of
  /// the loss scaled by `scaler`.
  virtual Tensor run_step(const std::vector<data::Batch>& batches, const Tensor& key,
                          const optim::GradScaler& scaler);
  /// Says that steps from now on are only run to be inspected, and that the running statistics that
  /// a failed step left are not read.
  virtual void leave_statistics() {
    if (statistics_) statistics_->stop();
  }
  /// Evaluates one batch without recording. Samples that could not be read do not count.
  virtual Evaluation evaluate(const data::Batch& batch);
  /// Computes the clipping of the gradients of the whole model, times `grad_scale` (0-d f64;
  /// undefined: 1).
  virtual optim::Clip clip(optim::Optimizer& optimizer, double max_norm, const Tensor& grad_scale);
  /// Whether a forward on one rank of data_group() requires the same forward on the others.
  virtual bool collective_forward() const { return false; }

  /// The number of parameters of the whole model.
  virtual int64_t num_parameters();
  /// Returns params_xxh128 of the whole parameters, on every rank.
  virtual std::string params_hash();
  /// Returns parameters and persistent buffers, whole, on rank 0 of `group`, the group of all
  /// ranks; an empty list on the others. One tensor at a time is gathered.
  virtual std::vector<NamedTensor> gather_state(ProcessGroup& group);

  /// How long the collectives of the last step were executing, as far as that is known.
  virtual double communication_ms() { return 0; }
  /// A line for the user about memory on this rank; it may be empty.
  virtual std::string memory() const { return {}; }

 protected:
  explicit Strategy(Task& task) : task_(task) {}
  /// Returns the mean loss of a batch.
  Tensor loss_of(const data::Batch& batch);
  /// Evaluates the predictions of a batch that is classified.
  Evaluation judge(const Tensor& logits, const Tensor& targets) const;
  /// Called with false for backwards before the last of a step.
  virtual void set_sync(bool) {}

  Task& task_;
  Ref<ProcessGroup> data_group_;
  /// The running statistics of batch-norm; null where the wrapper of the model handles them.
  std::unique_ptr<parallel::RunningStatistics> statistics_;
};

/// Distributes task.model over the ranks of `group` and fills it with values (task.fill). Throws
/// UserError for a mesh that does not fit the strategy or the number of ranks.
std::unique_ptr<Strategy> make_strategy(const Options& options, Ref<ProcessGroup> group,
                                        Task& task);
/// True for strategies under which no rank holds the whole model, which is then built without
/// values.
bool shards_parameters(const Options& options);

}  // namespace tessera::train
