// How a run is spread over ranks: --strategy and --mesh. A strategy makes the model parallel and
// says which ranks share a batch. Invariant: which samples a step has, and in which tree their
// gradients are summed under --deterministic, does not depend on the strategy.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "collectives/process_group.h"
#include "core/data/sampler.h"
#include "examples/train/options.h"
#include "examples/train/task.h"

namespace tessera::train {

class Strategy {
 public:
  virtual ~Strategy() = default;
  /// The ranks that each take their part of a batch; ranks of another coordinate on the other axes
  /// have groups of their own.
  ProcessGroup& data_group() const { return *data_group_; }
  virtual data::Deal deal() const { return data::Deal::kAccumulateThenReduce; }
  /// Micro-batches before the last of a step are run with false.
  virtual void set_sync(bool) {}
  /// A forward on one rank needs the same forward on the others.
  virtual bool collective_forward() const { return false; }
  /// How long the last step's collectives were executing, as far as it is known.
  virtual double communication_ms() { return 0; }
  /// A line for the user about memory on this rank; may be empty.
  virtual std::string memory() const { return {}; }

 protected:
  Ref<ProcessGroup> data_group_;
};

/// Spreads task.model over the ranks of `group` and fills it with values (task.fill). Throws
/// UserError for a mesh that does not fit the strategy or the number of ranks.
std::unique_ptr<Strategy> make_strategy(const Options& options, Ref<ProcessGroup> group,
                                        Task& task);
/// True for strategies whose parameters are cut: the model is then built without values.
bool shards_parameters(const Options& options);

/// Parameters and persistent buffers, whole, on rank 0 of `group`; elsewhere an empty list. Every
/// rank calls it; one tensor at a time is gathered.
std::vector<NamedTensor> gather_state(nn::Module& model, ProcessGroup& group);
/// params_xxh128 of the whole parameters, on every rank.
std::string hash_of(nn::Module& model);

}  // namespace tessera::train
