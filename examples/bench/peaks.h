// What this core and its memory can do at most, measured: the yardsticks of every other number.
// Invariant: kernels here do nothing but the instruction or the traffic that they measure, and
// their results are kept.
#pragma once
#include <cstdint>

namespace tessera::bench {

/// fp32 multiply-adds of the calling thread, FLOP/s (2 per multiply-add), best of several short
/// runs.
double measure_fma_peak();
/// bf16 dot products accumulated in f32, FLOP/s; 0 where the CPU has no instruction for it.
double measure_bf16_peak();

}  // namespace tessera::bench
