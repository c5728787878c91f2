// Which samples a rank reads, by its place among the ranks that share the data.
#pragma once
#include "core/data/loader.h"
#include "dtensor/mesh.h"

namespace tessera::parallel {

/// A sampler of this rank's samples: `options` with rank and world_size of `group` (null: the
/// world). Throws UserError as DistributedSampler does.
data::DistributedSampler distributed_sampler(data::SamplerOptions options,
                                             const Ref<ProcessGroup>& group = nullptr);
/// The same along data-parallel axes: mesh["dp"], mesh.slice({"replicate", "shard"}). Ranks that
/// differ along other axes alone (tp, pp) read the same samples, as they must.
data::DistributedSampler distributed_sampler(data::SamplerOptions options, const DeviceMesh& mesh);

/// The batches of this rank: a step of the ranks of `group` (null: the world) takes `batch_size`
/// samples each. The last of a pass may be short, or empty on some ranks; `drop_last` leaves them
/// out.
data::DataLoader distributed_loader(std::shared_ptr<const data::Dataset> dataset,
                                    const data::DataLoaderOptions& options = {},
                                    const Ref<ProcessGroup>& group = nullptr);

}  // namespace tessera::parallel
