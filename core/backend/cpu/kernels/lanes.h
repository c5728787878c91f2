// Interleaved partial results (lanes) that meet in a balanced tree: the order of a reduction
// depends on the number of lanes, not on vector width or threads.
#pragma once

namespace tessera::cpu {
namespace {

struct LaneSum {
  template <class T>
  static inline __attribute__((always_inline)) T join(T a, T b) {
    return a + b;
  }
};
/// NaN wins.
struct LaneMax {
  template <class T>
  static inline __attribute__((always_inline)) T join(T a, T b) {
    return a > b || a != a ? a : b;
  }
};

/// Lane i meets lane i + N / 2, and so on; the result is in lane 0.
template <class Op, int N, class T>
inline __attribute__((always_inline)) T fold(T* lane) {
  if constexpr (N > 1) {
    for (int i = 0; i < N / 2; ++i) lane[i] = Op::join(lane[i], lane[i + N / 2]);
    return fold<Op, N / 2>(lane);
  }
  return lane[0];
}

}  // namespace
}  // namespace tessera::cpu
