// A permutation of [0, n) that is computed, not stored: a Feistel network over the next power of
// four (Luby and Rackoff 1988) walked until it lands below n (Black and Rogaway, "Ciphers with
// arbitrary finite domains", 2002), with Philox as the round function. Invariant: a bijection for
// every n and key; any position costs O(1) time and no memory.
#pragma once
#include <bit>
#include <cstdint>

#include "core/tensor/philox.h"

namespace tessera::data {

/// Every use of a seed draws from counters of its own: bits 56-63 of the counter's high half.
enum class RandomUse : uint64_t { kShuffle = 0xD1, kWindow = 0xD2, kMask = 0xD3, kAugment = 0xD4 };

/// Where position `i` < `n` goes in permutation number `epoch` of `seed`. n in [1, 2^62].
constexpr int64_t permute(int64_t i, int64_t n, uint64_t seed, uint64_t epoch) {
  constexpr int kRounds = 8;  // the domain may be tiny, where fewer rounds leave visible patterns
  if (n <= 1) return 0;
  int half = (std::bit_width(uint64_t(n - 1)) + 1) / 2;
  uint64_t mask = (uint64_t(1) << half) - 1, x = uint64_t(i);
  do {
    uint64_t left = x >> half, right = x & mask;
    for (uint64_t round = 0; round < kRounds; ++round) {
      uint64_t high = uint64_t(RandomUse::kShuffle) << 56 | (epoch & 0xFFFFFFFFFFFF) << 8 | round;
      uint64_t mixed = left ^ (low64(philox4x32(seed, high, right)) & mask);
      left = right;
      right = mixed;
    }
    x = left << half | right;
  } while (x >= uint64_t(n));  // less than 4 walks on average: the domain is below 4n
  return int64_t(x);
}

/// Uniform in [0, n) for draw number `number` of `seed`: the high half of a 128-bit product (Lemire
/// 2019), with a bias below n / 2^64.
constexpr int64_t uniform_below(int64_t n, uint64_t seed, RandomUse use, uint64_t number) {
  __extension__ using Wide = unsigned __int128;
  uint64_t bits = low64(philox4x32(seed, uint64_t(use) << 56, number));
  return int64_t(uint64_t(Wide(bits) * uint64_t(n) >> 64));
}

}  // namespace tessera::data
