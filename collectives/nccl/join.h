// How ranks agree that NCCL moves their tensors: each tells what it has, and all draw the same
// conclusion.
#pragma once
#include "collectives/nccl/group.h"

namespace tessera::nccl {

/// Makes the group of cards beside `cpu`; all its ranks call it. Null where NCCL cannot serve them,
/// which is logged once: a rank has no NCCL, or two ranks share a card. Throws CommError where a
/// rank does not come, or NCCL fails.
Ref<::tessera::detail::CardGroup> join(ProcessGroup& cpu, Device device,
                                       const GroupContext& context);

}  // namespace tessera::nccl
