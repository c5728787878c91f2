// Fully sharded data parallelism: every rank keeps a piece of each parameter, of its gradient and
// of its optimizer state; a group of parameters (a block of the model) is gathered just before it
// is used and released after (Zhao et al., "PyTorch FSDP", VLDB 2023; Rajbhandari et al., "ZeRO",
// SC 2020). Parameters are sharded tensors (dtensor), so optimizer, norm and checkpoints work
// unchanged. Invariants: outside of forward the model holds the sharded parameters; groups are
// gathered and reduced in the same order on every rank; a gathered weight is not kept for backward
// but gathered again; at any time at most two groups are gathered and one group's whole gradients
// are alive, not counting the model's own group (see FsdpOptions::groups).
#pragma once
#include <functional>
#include <memory>
#include <optional>

#include "core/nn/module.h"
#include "dtensor/dtensor.h"
#include "parallel/data_parallel.h"

namespace tessera::parallel {

struct MixedPrecision {
  std::optional<DType> param = {};   // of gathered parameters and of inputs; none: unchanged
  std::optional<DType> reduce = {};  // in which gradients are summed over ranks; none: unchanged
  std::optional<DType> output = {};  // of the model's result; none: unchanged
};

struct FsdpOptions {
  /// A mesh of one axis, over which parameters are sharded, or of two, the first of which
  /// replicates (HSDP: a gather stays within the second). Undefined: all ranks of the world.
  /// Parameters that are already sharded over other axes of the same mesh (tensor parallel) stay
  /// so; those axes must come later in it.
  DeviceMesh mesh = {};
  /// Paths of the modules whose parameters are gathered together; "*" stands for one name ("h.*").
  /// Empty: the elements of every module list. Parameters in none of them belong to the model's own
  /// group, which stays gathered from forward to backward.
  std::vector<std::string> groups = {};
  /// The dim of a parameter that is sharded; null: dim 0. Any size will do; a rank may hold
  /// nothing.
  std::function<int(const std::string& name, const Tensor& parameter)> shard_dim = nullptr;
  bool reshard_after_forward = true;  // false: groups stay gathered until their backward
  bool prefetch = true;               // gather the next group while this one computes
  MixedPrecision precision = {};
  /// Whether what a rank holds stays in memory of the host: parameters, their reduced gradients,
  /// and so the optimizer's state and its steps, which the CPU computes. The device holds what is
  /// gathered, and whole gradients until they are reduced. For models on a device.
  bool offload = false;
  /// Whether micro-batches are summed in a balanced tree, so that the bits do not depend on how
  /// many of them a rank has (powers of two). Micro-batches are then assigned to ranks by
  /// data::Deal::kReduceThenAccumulate.
  bool tree_accumulation = false;
  /// Whether persistent float buffers that a training forward writes become the mean of their
  /// values on all ranks of the mesh (running_statistics.h). Otherwise each rank keeps its own.
  bool sync_buffers = true;
};

/// The bytes that parameters and gradients take on this rank. Where NCCL moves them, gathered
/// weights and gradients that are being reduced lie in rooms, which stay allocated from the first
/// step on: one for the model's own group and two that blocks share, or one for each block where
/// weights stay gathered.
struct FsdpMemory {
  int64_t sharded = 0;   // parameters; with offload: in memory of the host
  int64_t gathered = 0;  // whole parameters that are alive
  int64_t gathered_peak = 0;
  int64_t gradients = 0;  // whole gradients that are alive
  int64_t gradients_peak = 0;
  int64_t largest_group = 0;  // whole parameters of one group
  int64_t rooms = 0;          // that are allocated
};

/// What fully_shard attaches to a model, which keeps it alive. Gradients that accumulate without
/// sync are whole ones.
class Fsdp : public DataParallel {
 public:
  virtual FsdpMemory memory() const = 0;
  /// Gathers every group and puts whole (unrecorded) parameters into the model until reshard(): for
  /// code that reads them outside of forward, such as generation, or writes them, in the same way
  /// on every rank (load_state). Throws UserError when the model is gone. reshard() also throws
  /// when weights that were gathered in a narrower dtype have been written.
  virtual void unshard() = 0;
  virtual void reshard() = 0;
};

/// Shards the parameters of `model` and gathers them around its forward and backward from now on.
/// Call it before the optimizer is made (one made before refuses its first step). Parameters must
/// be equal on all ranks (drawn from one seed) or on the meta device; the latter get memory, for
/// parameters only that of this rank's piece, and no values until model.init(seed) or a checkpoint
/// fills them. Throws UserError for a parameter that fully_shard has sharded already, and for
/// offload from the CPU; ShardingError where a dim cannot be sharded. The model is then unchanged.
///
/// Weights of layers with nn::Fp8Options::gather_in_eight_bits, but tied ones, are quantised before
/// they are gathered, from the sharded parameter's own dtype whatever `precision.param` says, by
/// the scale of the whole weight; gradients are as `precision` says. Nothing else in forward can
/// read such a weight (UserError), and `offload` is refused. Between unshard() and reshard() it is
/// whole in the dtype of `precision.param`, from which its layer then quantises it. All ranks write
/// such weights between the same forwards, since the next one computes their scales by an
/// all-reduce: one that a rank makes alone is a CommError, which names the rank and its
/// all_reduce(max).
///
/// grad(loss, parameters) returns sharded, reduced gradients; hooks of a parameter see its sharded
/// gradient of each backward after the reduction. When a backward fails on a rank, the groups are
/// aborted, so the other ranks learn of it at once.
std::shared_ptr<Fsdp> fully_shard(nn::Module& model, const FsdpOptions& options = {});
template <class M>
std::shared_ptr<Fsdp> fully_shard(const std::shared_ptr<M>& model,
                                  const FsdpOptions& options = {}) {
  TESSERA_CHECK(model, "fully_shard: the model is null");
  return fully_shard(*model, options);
}

}  // namespace tessera::parallel
