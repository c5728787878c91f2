// How a run is spread over ranks: --strategy and --mesh. A strategy makes the model parallel and
// says which ranks share a batch. Invariant: which samples a step has, and in which tree their
// gradients are summed under --deterministic, does not depend on the strategy.
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

/// Of one batch.
struct Evaluation {
  double loss = 0;                 // the mean over samples that count
  int64_t counted = 0, right = 0;  // samples; right: classified right, where that is asked
};

class Strategy {
 public:
  virtual ~Strategy() = default;
  /// The ranks that each take their part of a batch; ranks of another coordinate on the other axes
  /// have groups of their own.
  ProcessGroup& data_group() const { return *data_group_; }
  virtual data::Deal deal() const { return data::Deal::kAccumulateThenReduce; }

  /// Forward and backward of this rank's micro-batches of a step; each draws its dropout keys from
  /// number `key` (i64 []) on. The mean loss of each, f64. Gradients are those of the loss scaled
  /// by `scaler`.
  virtual Tensor run_step(const std::vector<data::Batch>& batches, const Tensor& key,
                          const optim::GradScaler& scaler);
  /// Steps from now on are run to be looked at: what a step that failed has left in the running
  /// statistics is not read.
  virtual void leave_statistics() {
    if (statistics_) statistics_->stop();
  }
  /// One batch, nothing recorded. Samples that could not be read do not count.
  virtual Evaluation evaluate(const data::Batch& batch);
  /// Of the gradients of the whole model, times `grad_scale` (0-d f64; undefined: 1).
  virtual optim::Clip clip(optim::Optimizer& optimizer, double max_norm, const Tensor& grad_scale);
  /// A forward on one rank of data_group() needs the same forward on the others.
  virtual bool collective_forward() const { return false; }

  /// Number of parameters of the whole model.
  virtual int64_t num_parameters();
  /// params_xxh128 of the whole parameters, on every rank.
  virtual std::string params_hash();
  /// Parameters and persistent buffers, whole, on rank 0 of `group`, all ranks; elsewhere an empty
  /// list. One tensor at a time is gathered.
  virtual std::vector<NamedTensor> gather_state(ProcessGroup& group);

  /// How long the last step's collectives were executing, as far as it is known.
  virtual double communication_ms() { return 0; }
  /// A line for the user about memory on this rank; may be empty.
  virtual std::string memory() const { return {}; }

 protected:
  explicit Strategy(Task& task) : task_(task) {}
  /// The mean loss of a batch.
  Tensor loss_of(const data::Batch& batch);
  /// Of a batch that is classified.
  Evaluation judge(const Tensor& logits, const Tensor& targets) const;
  /// Backwards before the last of a step are run with false.
  virtual void set_sync(bool) {}

  Task& task_;
  Ref<ProcessGroup> data_group_;
  /// Of batch-norm; null where the wrapper of the model takes care of them.
  std::unique_ptr<parallel::RunningStatistics> statistics_;
};

/// Spreads task.model over the ranks of `group` and fills it with values (task.fill). Throws
/// UserError for a mesh that does not fit the strategy or the number of ranks.
std::unique_ptr<Strategy> make_strategy(const Options& options, Ref<ProcessGroup> group,
                                        Task& task);
/// True for strategies under which no rank holds the whole model: it is then built without values.
bool shards_parameters(const Options& options);

}  // namespace tessera::train
