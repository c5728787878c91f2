#pragma once
#include <vector>

#include "core/ops/create.h"

namespace tessera::test {

/// f64 [n]: first, first + 0.5, first + 1, ...
inline Tensor numbers(double first, int64_t n = 4) {
  std::vector<double> v;
  for (int64_t i = 0; i < n; ++i) v.push_back(first + 0.5 * double(i));
  return from_values<double>(std::span<const double>(v), {n});
}

}  // namespace tessera::test
