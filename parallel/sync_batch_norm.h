// Batch-norm with statistics over the batches of all ranks of a group, forward and backward, so
// that training does not depend on how a batch is distributed over ranks. It is in namespace nn,
// where users look for layers; core has no process groups. Invariant: with C channels, every rank
// gets 2 C + 1 f64 from each rank in forward and sums of 2 C in backward, and all compute the same
// bits from them: the statistics and, with equal weights, the running ones.
#pragma once
#include "collectives/process_group.h"
#include "core/nn/conv_layers.h"

namespace tessera::nn {

/// x is [N, C, ..] with any number of dims; ranks may have batches of different sizes, or none. Its
/// channels may be cut over other ranks (tensor parallelism), and weight and bias with them.
/// Otherwise it is like BatchNorm1d: one value a channel on all ranks together is refused, on every
/// rank. In evaluation, and in a group of one rank, it is plain batch-norm.
class SyncBatchNorm final : public BatchNormNd {
 public:
  SyncBatchNorm(const BatchNormOptions& options, Ref<ProcessGroup> group);
};

/// `group` null: world(). In training, every rank of the group must call it equally often, each
/// with its part of the batch. Gradients of weight and bias are those of this rank's part, as ddp
/// and fully_shard expect. It has no second derivative.
std::shared_ptr<SyncBatchNorm> sync_batch_norm(const BatchNormOptions& options,
                                               Ref<ProcessGroup> group = {});

/// Replaces every batch-norm of `module` by one over the ranks of `group` (null: world()), in
/// place: parameters, buffers, names and an optimizer that holds them stay valid. Throws UserError
/// where there is none.
void convert_sync_batch_norm(Module& module, Ref<ProcessGroup> group = {});

}  // namespace tessera::nn
