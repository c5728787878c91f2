// Why NCCL failed on a rank: most likely because another one has ended, which NCCL may notice
// before the launcher has said so.
#pragma once
#include "collectives/engine.h"
#include "collectives/store/store.h"

namespace tessera::nccl {

/// The error that begins with `text` and blames the members that have ended; where none has, it
/// ends with `otherwise` and blames `own`, ranks of the group. Gives the launcher a moment to
/// announce them.
CommError nccl_failure(const std::string& text, const ::tessera::detail::Membership& members,
                       Store& store, uint64_t seq, const std::string& otherwise,
                       std::vector<int> own);

}  // namespace tessera::nccl
