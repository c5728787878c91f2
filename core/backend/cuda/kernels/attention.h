// The host's side of attention.cu and attention_units.cu: instances and geometry. Heads wider than
// the widest instance are for the op's decomposition.
#pragma once
#include <cstdint>
#include <optional>
#include <span>

#include "core/backend/cuda/kernels/parameters.h"
#include "core/backend/cuda/kernels/text.h"
#include "core/tensor/dtype.h"

namespace tessera::cuda {

/// What an instance holds: heads of up to `head` elements, `tile` positions at a time. `units`: the
/// matrix units multiply, for 16-bit floats.
struct AttentionShape {
  int head, tile;
  bool units = false;
};
/// The instances of a dtype, the fastest first.
std::span<const AttentionShape> attention_shapes(DType dtype);
/// The first that holds heads of `width` elements in `shared_bytes` of shared memory, which is what
/// the card has for a block; none where no instance does.
std::optional<AttentionShape> attention_shape(DType dtype, int64_t width, size_t shared_bytes);

/// "attention" or "attention_units".
const char* attention_family(AttentionShape shape);
/// Entries forward, delta, queries and keys; with a mask or without, with dropout or without.
Instance attention_instance(DType dtype, AttentionShape shape, bool masked, bool dropped);
/// Entries bias, a warp a line, and blank, a thread a row; 16-bit floats.
Instance attention_mask_instance(DType dtype);

enum class AttentionEntry { kForward, kDelta, kQueries, kKeys };
/// `positions`, at least one, are the queries, for kKeys the keys. Shared memory is above 48 KiB:
/// the function's limit has to be raised first.
Geometry attention_geometry(AttentionEntry entry, DType dtype, AttentionShape shape,
                            int64_t batch_heads, int64_t positions, bool dropped);

}  // namespace tessera::cuda
