// The host's side of attention.cu: instances and geometry. Heads wider than the widest instance are
// for the op's decomposition.
#pragma once
#include <cstdint>

#include "core/backend/cuda/kernels/parameters.h"
#include "core/backend/cuda/kernels/text.h"
#include "core/tensor/dtype.h"

namespace tessera::cuda {

/// Widths that instances hold; a head takes the first that both its widths fit in.
inline constexpr int kAttentionHeads[] = {64, 128};

/// Entries forward, delta, queries and keys.
Instance attention_instance(DType dtype, int head);

enum class AttentionEntry { kForward, kDelta, kQueries, kKeys };
/// `positions` are the queries, for kKeys the keys. Shared memory is above 48 KiB: the function's
/// limit has to be raised first.
Geometry attention_geometry(AttentionEntry entry, DType dtype, int head, int64_t batch_heads,
                            int64_t positions);

}  // namespace tessera::cuda
