// Instances and geometry of attention; see attention.h.
#include "core/backend/cuda/kernels/attention.h"

#include <fmt/format.h>

#include "core/backend/cuda/kernels/walk.h"

namespace tessera::cuda {
namespace {

// Cards of compute capability 8.6, 8.9 and 12.x have 99 KiB for a block, which the wide tiles of
// wide heads exceed.
constexpr AttentionShape kSingle[] = {{64, 64}, {128, 64}, {128, 32}};
constexpr AttentionShape kDouble[] = {{64, 32}, {128, 32}, {128, 16}};

constexpr AttentionShape kUnits[] = {{64, 64, true}, {128, 32, true}};
constexpr int kUnitRows = 64;

// Tiles of heads and of weights that an entry keeps in shared memory, and which are dropped.
int64_t shared_bytes(AttentionEntry entry, DType dtype, AttentionShape s, bool dropped) {
  if (entry == AttentionEntry::kDelta) return 0;
  const int64_t kept = dropped ? 24 + s.tile * (s.units ? kUnitRows : s.tile) / 4 : 0;
  if (s.units) {
    const int64_t own = entry == AttentionEntry::kForward ? 1 : 2, stages = 2;
    return 2 * (s.head + 8) * (own * kUnitRows + stages * 2 * s.tile) + kept;
  }
  const int64_t heads = entry == AttentionEntry::kForward ? 3 : 4;
  const int64_t weights = entry == AttentionEntry::kKeys ? 2 : 1;
  return s.tile * (dtype == kF64 ? 8 : 4) * (heads * (s.head + 1) + weights * (s.tile + 1)) + kept;
}

}  // namespace

std::span<const AttentionShape> attention_shapes(DType dtype) {
  if (dtype == kF64) return kDouble;
  return dtype == kF32 ? std::span<const AttentionShape>(kSingle) : kUnits;
}

std::optional<AttentionShape> attention_shape(DType dtype, int64_t width, size_t bytes) {
  for (const AttentionShape& s : attention_shapes(dtype))
    if (width <= s.head && shared_bytes(AttentionEntry::kKeys, dtype, s, true) <= int64_t(bytes))
      return s;
  return std::nullopt;
}

const char* attention_family(AttentionShape s) { return s.units ? "attention_units" : "attention"; }

// Bounds of a launch, by which the compiler chooses how many registers a thread has.
const char* bounds(DType dtype, AttentionShape s, bool masked, bool dropped) {
  // 128 registers are too few for a mask or for dropout.
  if (s.units) return masked || dropped ? "128, 2" : "128";
  // Without a bound `keys` of small tiles have 64 registers, which is too few.
  if (masked || dropped) return s.tile == 32 && dtype == kF32 ? "256, 2" : "256, 1";
  return s.tile == 32 ? "256, 2" : "256";
}

Instance attention_instance(DType dtype, AttentionShape s, bool masked, bool dropped) {
  return {fmt::format("{}_{}_{}x{}{}{}", attention_family(s), name_of(dtype), s.head, s.tile,
                      masked ? "_masked" : "", dropped ? "_dropped" : ""),
          {{"T", std::string(element_type(name_of(dtype)))},
           {"HEAD", std::to_string(s.head)},
           {"TILE", std::to_string(s.tile)},
           {"MASKED", masked ? "true" : "false"},
           {"DROPPED", dropped ? "true" : "false"},
           {"BOUNDS", bounds(dtype, s, masked, dropped)}}};
}

Instance attention_mask_instance(DType dtype) {
  return {fmt::format("attention_mask_{}", name_of(dtype)),
          {{"T", std::string(element_type(name_of(dtype)))}}};
}

Geometry attention_geometry(AttentionEntry entry, DType dtype, AttentionShape shape,
                            int64_t batch_heads, int64_t positions, bool dropped) {
  const int64_t tile = entry == AttentionEntry::kDelta ? 8 : shape.units ? kUnitRows : shape.tile;
  Geometry g = cover(batch_heads * ((positions + tile - 1) / tile), 1);
  g.block[0] = shape.units && entry != AttentionEntry::kDelta ? 128 : 256;
  g.shared_bytes = unsigned(shared_bytes(entry, dtype, shape, dropped));
  return g;
}

}  // namespace tessera::cuda
