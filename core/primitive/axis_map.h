// Which loop of an op each dim of each operand belongs to. Sharding and batching rules are derived
// from it, so an op states it once. Invariant (verify_axes): the loops of a dim multiply to its
// extent; a kPass loop that is read is written; a reduced loop is not.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "core/tensor/tensor.h"

namespace tessera {

using MetaSpan = std::span<const Meta* const>;
using Metas = SmallVector<Meta, 2>;

/// One loop of an op. A loop may be split over ranks unless it is kWhole. A split kPass loop splits
/// the output; a split kSum or kMax loop leaves every rank with a term of the output, to be reduced
/// with + or max.
struct Factor {
  enum Kind : uint8_t { kPass, kSum, kMax, kWhole } kind = kPass;
  int64_t extent = 1;
};

/// Factors of one dim, outermost first. Only the first can be split. The empty product is a dim of
/// extent 1 that no rank may be without; with a factor of extent 1 the first rank alone has it.
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

/// The elements of a dim that a rank holds when it holds `loops[f]` of every factor f: those of the
/// dim's first loop, in steps of the loops inside it. An empty product is whole: {0, 1, 1}.
Range range_of(const DimLoops& dim, std::span<const Range> loops);
/// Extents of an operand (or result) on a rank that holds `loops`.
Shape local_shape(const OperandLoops& operand, std::span<const Range> loops);

/// Throws BugError naming `op` unless `map` describes operands `in` and results `out`.
void verify_axes(std::string_view op, const AxisMap& map, MetaSpan in, std::span<const Meta> out);

}  // namespace tessera
