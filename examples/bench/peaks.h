// What this core and its memory can do at most, measured: the yardsticks of every other number.
// Invariant: kernels here do nothing but the instruction or the traffic that they measure, and
// their results are kept. Rates are the best of several short runs, since anything else that runs
// can only lower them.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace tessera::bench {

/// fp32 multiply-adds of the calling thread, FLOP/s (2 per multiply-add), with the widest vectors
/// of the instruction set in use.
double measure_fma_peak();
/// bf16 dot products accumulated in f32, FLOP/s; 0 where the CPU has no instruction for it.
double measure_bf16_peak();

enum class Traffic { kRead, kCopy, kStreamingCopy };  // streaming: stores that pass the caches
/// Bytes/s of the calling thread, read plus written, over `bytes` of memory in all (both sides of a
/// copy).
double measure_bandwidth(Traffic traffic, int64_t bytes);

/// Copies `n` bytes, a multiple of 256, between addresses that are multiples of 64.
void copy_memory(Traffic traffic, char* to, const char* from, int64_t n);
/// One sweep that reads `read` bytes and writes `written`, in proportion all along, and does
/// nothing else: copies what it can, adds up what it only reads, and repeats what it only writes. A
/// yardstick more than a bound where it does both: it takes turns, piece by piece.
/// Addresses are multiples of 64; counts are taken down to multiples of 512. `traffic` says how it
/// writes.
void move_memory(Traffic traffic, char* to, int64_t written, const char* from, int64_t read);

/// A level of memory and how much of it a measure uses, so that it stays in that level.
struct Level {
  std::string name;  // L1, L2, L3, DRAM
  int64_t size = 0;  // of the cache; 0: DRAM
  int64_t use = 0;
};
/// Levels as the system describes them for the first core; `cores` cores use a shared cache at
/// once.
std::vector<Level> memory_levels(int cores);

}  // namespace tessera::bench
