// The loops of an op, and which of them each dim of each operand runs over. Sharding and batching
// rules are derived from this map, so an op states it once. Invariant (verify_axes): the extents of
// a dim's loops multiply to its extent; results have every kPass loop, and no reduced loop.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "core/tensor/tensor.h"

namespace tessera {

using MetaSpan = std::span<const Meta* const>;

/// Whether `t` is a number that may stand beside operands on any device.
inline bool is_host_number(const Meta& t) { return t.device.is_cpu() && t.shape.empty(); }
/// The device of the operands: of the first that is no host number, the CPU where all are.
inline Device device_of(MetaSpan in) {
  for (const Meta* m : in)
    if (!is_host_number(*m)) return m->device;
  return kCPU;
}

using Metas = SmallVector<Meta, 2>;

/// One loop of an op. A loop may be split over ranks unless it is kWhole. A split kPass loop splits
/// the output; a split kSum or kMax loop leaves every rank with a term of the output, to be reduced
/// with + or max.
struct Factor {
  enum Kind : uint8_t { kPass, kSum, kMax, kWhole } kind = kPass;
  int64_t extent = 1;
};

/// Factors of one dim, outermost first; only the first may be split. A dim of extent 1 without any
/// factor is whole on every rank; one with a factor of extent 1 is on the first rank alone.
using DimLoops = SmallVector<int, 2>;
using OperandLoops = SmallVector<DimLoops, 4>;

struct AxisMap {
  SmallVector<Factor, 6> factors;
  SmallVector<OperandLoops, 3> in;   // [operand][dim] -> factors
  SmallVector<OperandLoops, 2> out;  // [result][dim] -> factors
  uint32_t linear_in = 0;  // bit i: linear in operand i while the others are fixed (mul, contract)
  bool jointly_linear = false;  // linear in all operands together (add, concat, reshape)
  uint32_t shape_only = 0;      // bit i: the values of operand i are never read

  /// True for the default map: nothing may be split.
  bool empty() const { return out.empty(); }
  int add(Factor::Kind kind, int64_t extent) {
    factors.push_back({kind, extent});
    return int(factors.size()) - 1;
  }
};

/// One kPass loop per dim of `out`, shared by every operand dim that broadcasts to it; operands are
/// aligned to the right.
AxisMap pointwise_axes(MetaSpan in, const Shape& out);
/// Loops of an operand that broadcasts to `out`, where dim d of `out` is factor d.
OperandLoops broadcast_loops(const Shape& operand, const Shape& out);

/// The elements of a dim that a rank holds when it holds `loops[f]` of every factor f: the range of
/// the first factor, times the extents of those inside it. A dim without factors: {0, 1, 1}.
Range range_of(const DimLoops& dim, std::span<const Range> loops);
/// Extents of an operand (or result) on a rank that holds `loops`.
Shape local_shape(const OperandLoops& operand, std::span<const Range> loops);

/// Throws BugError naming `op` unless `map` fits operands of types `in` and results of types `out`.
void verify_axes(std::string_view op, const AxisMap& map, MetaSpan in, std::span<const Meta> out);

}  // namespace tessera
