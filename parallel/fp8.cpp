#include "parallel/fp8.h"

#include "collectives/ops.h"
#include "core/dispatch/sharding.h"
#include "dtensor/dtensor.h"

namespace tessera::nn {

void update_fp8_scales(Module& model, const Ref<ProcessGroup>& group) {
  const Ref<ProcessGroup> ranks = group ? group : Ref<ProcessGroup>(&world());
  if (ranks->size() == 1) return update_fp8_scales(model);
  update_fp8_scales(model, [&](const Tensor& most) {
    const Tensor all = all_reduce(local_of(most), ranks, ReduceOp::kMax);
    const ShardingLayer* sharding = sharding_of(most);
    return sharding ? sharding->with_local(most.meta(), all) : all;
  });
}

}  // namespace tessera::nn
