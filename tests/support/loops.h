// Parts of an op: the operands of a rank that holds a part of one of the op's loops.
#pragma once
#include "core/ops/views.h"
#include "core/primitive/primitive.h"

namespace tessera::test {

/// Where a loop is in an operand: the dim that it leads, and the extent of the loops inside it
/// there.
struct Place {
  int dim = -1;
  int64_t inner = 1;
  bool leads = true;
};

inline Place place_of(const AxisMap& map, const OperandLoops& loops, int f) {
  Place p;
  for (int d = 0; d < int(loops.size()); ++d)
    for (size_t k = 0; k < loops[size_t(d)].size(); ++k) {
      if (loops[size_t(d)][k] != f) continue;
      p.dim = d;
      p.leads = k == 0;
      for (size_t i = 1; i < loops[size_t(d)].size(); ++i)
        p.inner *= map.factors[size_t(loops[size_t(d)][i])].extent;
    }
  return p;
}

inline bool leads_everywhere(const AxisMap& map, int f) {
  for (const OperandLoops& l : map.in)
    if (!place_of(map, l, f).leads) return false;
  for (const OperandLoops& l : map.out)
    if (!place_of(map, l, f).leads) return false;
  return true;
}

inline Tensor part_of(const Tensor& t, const Place& p, const Range& r) {
  return p.dim < 0 ? t : narrow(t, p.dim, r.begin * p.inner, r.size * p.inner);
}

/// What each loop of an op holds when loop `f` is cut to `part` and the others are whole.
inline std::vector<Range> loops_with(const AxisMap& map, int f, const Range& part) {
  std::vector<Range> loops;
  for (const Factor& x : map.factors) loops.push_back({0, x.extent, x.extent});
  loops[size_t(f)] = part;
  return loops;
}

}  // namespace tessera::test
