// Chooses the samples that a rank reads, by its position among the ranks that share the data.
#pragma once
#include "core/data/loader.h"
#include "dtensor/mesh.h"

namespace tessera::parallel {

/// Returns a sampler of this rank's samples: `options` with rank and world_size of `group` (null:
/// the world). Throws UserError as DistributedSampler does.
data::DistributedSampler distributed_sampler(data::SamplerOptions options,
                                             const Ref<ProcessGroup>& group = nullptr);
/// Does the same along data-parallel axes: mesh["dp"], mesh.slice({"replicate", "shard"}). Ranks
/// that differ only along other axes (tp, pp) read the same samples, as they must.
data::DistributedSampler distributed_sampler(data::SamplerOptions options, const DeviceMesh& mesh);

/// Returns a loader of this rank's batches: in a step, each rank of `group` (null: the world) takes
/// `batch_size` samples. The last batch of a pass may be short, or empty on some ranks; `drop_last`
/// leaves it out.
data::DataLoader distributed_loader(std::shared_ptr<const data::Dataset> dataset,
                                    const data::DataLoaderOptions& options = {},
                                    const Ref<ProcessGroup>& group = nullptr);

}  // namespace tessera::parallel
