// The measured peaks of this core and its memory, with which every other number is compared.
// Invariant: kernels here do only the instruction or the traffic that they measure, and their
// results are kept. Rates are the best of several short runs, since anything else that runs can
// only lower them.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace tessera::bench {

/// The rate of fp32 multiply-adds of the calling thread in FLOP/s (2 per multiply-add), with the
/// widest vectors of the instruction set in use.
double measure_fma_peak();
/// The rate of bf16 dot products accumulated in f32, in FLOP/s; 0 where the CPU has no instruction
/// for it.
double measure_bf16_peak();

enum class Traffic { kRead, kCopy, kStreamingCopy };  // kStreamingCopy: stores past the caches
/// The bandwidth of the calling thread in bytes/s, read plus written, over `bytes` of memory in all
/// (both sides of a copy).
double measure_bandwidth(Traffic traffic, int64_t bytes);

/// Copies `n` bytes, a multiple of 256, between addresses that are multiples of 64.
void copy_memory(Traffic traffic, char* to, const char* from, int64_t n);
/// Reads `read` bytes and writes `written` bytes in one sweep, in this proportion throughout, and
/// does nothing else: it copies what it can, adds up what it only reads, and repeats what it only
/// writes. Where it does both it is more a comparison than a bound, since it alternates between
/// them. Addresses are multiples of 64; counts are rounded down to multiples of 512. `traffic`
/// chooses the kind of stores.
void move_memory(Traffic traffic, char* to, int64_t written, const char* from, int64_t read);

/// A level of memory, and the bytes that a measure uses so that it stays in that level.
struct Level {
  std::string name;  // L1, L2, L3, DRAM
  int64_t size = 0;  // of the cache; 0: DRAM
  int64_t use = 0;
};
/// The levels as the system describes them for the first core; `cores` cores share a shared cache.
std::vector<Level> memory_levels(int cores);

}  // namespace tessera::bench
