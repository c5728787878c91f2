// Delayed scaling of eight-bit layers (core/nn/fp8.h) where ranks share a model. It is in namespace
// nn, where users look for layers; core has no process groups.
#pragma once
#include "collectives/process_group.h"
#include "core/nn/fp8.h"

namespace tessera::nn {

/// update_fp8_scales() with the largest magnitudes of all ranks of `group` (null: world()), so that
/// equal histories stay equal: one all-reduce for all layers. `group` has the ranks that share a
/// batch; those that share a tensor have its magnitude already.
void update_fp8_scales(Module& model, const Ref<ProcessGroup>& group);

}  // namespace tessera::nn
