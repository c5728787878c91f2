#include "parallel/sampler.h"

namespace tessera::parallel {

data::DistributedSampler distributed_sampler(data::SamplerOptions options,
                                             const Ref<ProcessGroup>& group) {
  const ProcessGroup& ranks = group ? *group : world();
  options.rank = ranks.rank();
  options.world_size = ranks.size();
  return data::DistributedSampler(options);
}

data::DistributedSampler distributed_sampler(data::SamplerOptions options, const DeviceMesh& mesh) {
  options.rank = 0;
  for (int axis = 0; axis < mesh.ndim(); ++axis)
    options.rank = options.rank * int(mesh.sizes()[axis]) + int(mesh.coordinate()[axis]);
  options.world_size = mesh.size();
  return data::DistributedSampler(options);
}

data::DataLoader distributed_loader(std::shared_ptr<const data::Dataset> dataset,
                                    const data::DataLoaderOptions& options,
                                    const Ref<ProcessGroup>& group) {
  TESSERA_CHECK(dataset, "distributed_loader: the dataset is null");
  data::DistributedSampler sampler = distributed_sampler(options.sampling(dataset->size()), group);
  return data::DataLoader(std::move(dataset), std::move(sampler), options.reading());
}

}  // namespace tessera::parallel
