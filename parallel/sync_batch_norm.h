// Batch-norm whose statistics are over the batches of all ranks of a group, forward and backward,
// so that training does not depend on how a batch is spread over ranks. It stands in nn, where
// layers are looked for; core knows no groups. Invariant: with n_r values a channel on rank r,
// every rank gets 2 C + 1 f64 of each in forward and sums of 2 C in backward, and all have the same
// bits of what follows from them: statistics, and with equal weights the running ones.
#pragma once
#include "collectives/process_group.h"
#include "core/nn/conv_layers.h"

namespace tessera::nn {

/// x [N, C, ..] of any number of dims; ranks may have batches of different sizes, or none. Its
/// channels may be cut over other ranks (tensor parallelism), weight and bias then as they are.
/// Otherwise as BatchNorm1d: one value a channel on all ranks together is refused, on every rank.
/// In evaluation, and in a group of one rank, it is plain batch-norm.
class SyncBatchNorm final : public BatchNormNd {
 public:
  SyncBatchNorm(const BatchNormOptions& options, Ref<ProcessGroup> group);
};

/// `group` null: world(). While it trains, every rank of the group must call it, with its part of
/// the batch, once for each call of the others. Gradients of weight and bias are those of this
/// rank's part, as ddp and fully_shard take them. Its derivative has none of its own.
std::shared_ptr<SyncBatchNorm> sync_batch_norm(const BatchNormOptions& options,
                                               Ref<ProcessGroup> group = {});

/// Makes every batch-norm of `module` one over the ranks of `group` (null: world()), in its place:
/// parameters, buffers, names and an optimizer of them stay. Throws UserError where there is none.
void convert_sync_batch_norm(Module& module, Ref<ProcessGroup> group = {});

}  // namespace tessera::nn
