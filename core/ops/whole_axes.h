// Which loops of an op stay whole for what another op does with its result beside it.
#pragma once
#include "core/primitive/axis_map.h"

namespace tessera {

/// Leaves the sums of `m` whole: ranks with terms of a sum would each apply what follows it, which
/// is not linear.
inline void keep_sums_whole(AxisMap& m) {
  for (Factor& f : m.factors)
    if (f.kind == Factor::kSum) f.kind = Factor::kWhole;
  m.linear_in = 0;
}
/// Leaves every loop of `m` whole, for what is summed over all of the result.
inline void keep_whole(AxisMap& m) {
  for (Factor& f : m.factors) f.kind = Factor::kWhole;
  m.linear_in = 0;
}

}  // namespace tessera
