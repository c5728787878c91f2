// Tensor parallelism: weights of a module are cut over an axis of a mesh, and hooks place what goes
// in and out, so that the module's own code runs unchanged on sharded tensors. Shoeybi et al.,
// "Megatron-LM", 2019; sequence parallelism: Korthikanti et al., MLSys 2023. Invariant: a pair of a
// column-wise and a row-wise layer costs one collective forward and one backward.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/nn/module.h"
#include "dtensor/dtensor.h"

namespace tessera::parallel {

/// What parallelize_module does with one module.
class ParallelStyle {
 public:
  virtual ~ParallelStyle() = default;
  /// Shards parameters of `module`, which is somewhere in `root`, and adds its hooks. `path` is for
  /// errors.
  virtual void apply(nn::Module& root, nn::Module& module, const std::string& path,
                     const DeviceMesh& mesh) const = 0;
};
using StylePtr = std::shared_ptr<const ParallelStyle>;

/// Paths of modules, in which "*" stands for one name, and how each is made parallel.
using ParallelPlan = std::vector<std::pair<std::string, StylePtr>>;

struct ColwiseOptions {
  int64_t unit = 1;                      // rows of the weight that must stay together: a head's
  std::optional<Placement> output = {};  // none: cut as the weight's rows are
};
/// Linear, and a convolution of one group: weight [out, in, ..] and bias are cut by `out`; the
/// input is made whole, and its gradient summed over ranks (or scattered, where it came in cut).
/// Embedding: the table is cut by columns.
StylePtr colwise(const ColwiseOptions& options = {});

struct RowwiseOptions {
  int64_t unit = 1;                // columns of the weight that must stay together
  Placement output = Replicate();  // or Shard(1): sequence parallel; of a convolution, by channels
};
/// Linear, and a convolution of one group: weight [out, in, ..] is cut by `in`, which the input's
/// last dim (its channels) must be cut like; the bias is added once. Embedding: the table is cut by
/// rows, each rank looks up the ids it has.
StylePtr rowwise(const RowwiseOptions& options = {});

/// Norms and dropouts between tensor-parallel regions, computed on a part of the sequence, dim 1 of
/// their input: parameters are whole, their gradients summed over ranks. `output`: what the result
/// is turned into; none: it stays cut.
StylePtr sequence_parallel(std::optional<Placement> output = {});

/// Batch-norm of channels that are cut over ranks, as a column-wise convolution leaves them:
/// weight, bias and running statistics are cut alike, and each rank has the statistics of its
/// channels. `output`: what the result is turned into; none: it stays cut.
StylePtr channel_parallel(std::optional<Placement> output = {});

/// Turns the result into `output`. Its gradient is passed on as the result came, summed where that
/// was whole: what stands before a head whose weight is cut.
StylePtr prepare_output(Placement output = Replicate());

/// The Linear layers of a module, in order: column-wise, row-wise, column-wise, ... Their number is
/// even.
StylePtr pairwise();

/// Applies `plan` to the modules of `module` over `mesh`, which has one axis. Parameters and
/// buffers that no style shards are whole on every rank; plain tensors that go into `module` are
/// taken to be the same on every rank. Parameters must be equal on all ranks, or on the meta device
/// (they stay there: fully_shard or materialize gives them memory). Throws UserError for a pattern
/// that names no module or one that the style cannot serve.
void parallelize_module(nn::Module& module, const DeviceMesh& mesh, const ParallelPlan& plan);

/// Gives parameters on the meta device memory on the cpu, this rank's piece each, without values
/// until module.init(seed) or a checkpoint fills them.
void materialize(nn::Module& module);

}  // namespace tessera::parallel
