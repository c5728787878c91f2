// Tensor parallelism: weights of a module are cut over an axis of a mesh, and hooks set the
// placements of its inputs and outputs, so that the module's own code runs unchanged on sharded
// tensors (Shoeybi et al., "Megatron-LM", 2019; sequence parallelism: Korthikanti et al., MLSys
// 2023). Invariant: a pair of a column-wise and a row-wise layer costs one collective forward and
// one backward.
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
  /// Shards parameters of `module`, which is somewhere in `root`, and adds its hooks. `path` is
  /// used in errors.
  virtual void apply(nn::Module& root, nn::Module& module, const std::string& path,
                     const DeviceMesh& mesh) const = 0;
};
using StylePtr = std::shared_ptr<const ParallelStyle>;

/// Pairs of a module path, in which "*" stands for one name, and the style of the modules it names.
using ParallelPlan = std::vector<std::pair<std::string, StylePtr>>;

struct ColwiseOptions {
  int64_t unit = 1;  // rows of the weight that stay together: those of an attention head
  std::optional<Placement> output = {};  // none: the result is cut as the rows are
};
/// For Linear and for a convolution of one group: cuts weight [out, in, ..] and bias by `out`. The
/// input is made whole; its gradient is summed over ranks, or scattered where the input was cut.
/// For Embedding: cuts the table by columns.
StylePtr colwise(const ColwiseOptions& options = {});

struct RowwiseOptions {
  int64_t unit = 1;                // columns of the weight that stay together
  Placement output = Replicate();  // or Shard(1): sequence parallel; for a convolution, by channels
};
/// For Linear and for a convolution of one group: cuts weight [out, in, ..] by `in`; the input's
/// last dim (for a convolution, its channels) must be cut in the same way; the bias is added once.
/// For Embedding: cuts the table by rows; each rank looks up the ids whose rows it has.
StylePtr rowwise(const RowwiseOptions& options = {});

/// For norms and dropouts between tensor-parallel regions: they run on a part of the sequence, dim
/// 1 of their input; parameters are whole and their gradients summed over ranks. `output`: the
/// placement of the result; none: it stays cut.
StylePtr sequence_parallel(std::optional<Placement> output = {});

/// For batch-norm of channels that are cut over ranks, as a column-wise convolution leaves them:
/// weight, bias and running statistics are cut in the same way, and each rank has the statistics of
/// its channels. `output`: the placement of the result; none: it stays cut.
StylePtr channel_parallel(std::optional<Placement> output = {});

/// Redistributes the result of a module to `output`. Its gradient gets the placement that the
/// result had, summed where the result was whole. It is for the module before a head whose weight
/// is cut.
StylePtr prepare_output(Placement output = Replicate());

/// Makes the Linear layers of a module, in order, column-wise, row-wise, column-wise, ... Their
/// number must be even.
StylePtr pairwise();

/// Applies `plan` to the modules of `module` over `mesh`, which must have one axis. Parameters and
/// buffers that no style shards are whole on every rank; plain tensors passed to `module` are taken
/// to be the same on every rank. Parameters must be equal on all ranks, or on the meta device
/// (where they stay until fully_shard or materialize gives them memory). Throws UserError for a
/// pattern that names no module, and for a module that its style does not support.
void parallelize_module(nn::Module& module, const DeviceMesh& mesh, const ParallelPlan& plan);

/// Gives what is on the meta device memory on the default device, each rank for its piece.
/// Parameters have no values until module.init(seed) or a checkpoint fills them; buffers are zeros.
void materialize(nn::Module& module);

}  // namespace tessera::parallel
