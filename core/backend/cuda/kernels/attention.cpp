// Instances and geometry of attention; see attention.h.
#include "core/backend/cuda/kernels/attention.h"

#include <fmt/format.h>

namespace tessera::cuda {

Instance attention_instance(DType dtype, int head) {
  return {fmt::format("attention_{}_{}", name_of(dtype), head),
          {{"T", std::string(element_type(name_of(dtype)))}, {"HEAD", std::to_string(head)}}};
}

Geometry attention_geometry(AttentionEntry entry, DType dtype, int head, int64_t batch_heads,
                            int64_t positions) {
  const bool wide = dtype == kF64;
  const int64_t tile = entry == AttentionEntry::kDelta ? 8 : wide ? 32 : 64, bytes = wide ? 8 : 4;
  const int64_t heads = entry == AttentionEntry::kForward ? 3 : 4;
  const int64_t weights = entry == AttentionEntry::kKeys ? 2 : 1;
  const int64_t shared = tile * bytes * (heads * (head + 1) + weights * (tile + 1));
  Geometry g;
  g.grid[0] = unsigned((positions + tile - 1) / tile), g.grid[1] = unsigned(batch_heads);
  g.block[0] = 256;
  g.shared_bytes = entry == AttentionEntry::kDelta ? 0 : unsigned(shared);
  return g;
}

}  // namespace tessera::cuda
