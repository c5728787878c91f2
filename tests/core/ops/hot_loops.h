// Loops over the functions that take most time in models, compiled as kernels are compiled.
#pragma once

namespace tessera::test {

struct HotLoop {
  const char* name;
  void (*all_at_once)(const float* x, float* y, int n);
  void (*one_by_one)(const float* x, float* y, int n);  // which no vectoriser can touch
};
inline constexpr int kHotLoops = 14;
extern const HotLoop hot_loops[kHotLoops];

}  // namespace tessera::test
