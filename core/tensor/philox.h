// Philox 4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random
// numbers: as easy as 1, 2, 3" (SC'11): 128 random bits are a pure function of a key and a counter,
// so element i of a tensor or sample number s gets the same bits on any rank, thread or device.
// Includes nothing but fixed-width integers, so that kernels and generated code can share the text.
// Invariant: output equals the known answers of the authors' Random123 library.
#pragma once
#include <cstdint>

namespace tessera {

/// 128 random bits as four words.
struct Philox4 {
  uint32_t v[4];
};

/// The block of random bits at counter (`counter_hi`, `counter_lo`) under `key`. Word order is that
/// of Random123: counter word 0 is the low half of `counter_lo`, word 3 the high half of
/// `counter_hi`; key word 0 is the low half.
constexpr Philox4 philox4x32(uint64_t key, uint64_t counter_hi, uint64_t counter_lo) {
  constexpr uint32_t kMultiplier0 = 0xD2511F53u, kMultiplier1 = 0xCD9E8D57u;
  constexpr uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;  // golden ratio, sqrt(3) - 1
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
  uint32_t c0 = uint32_t(counter_lo), c1 = uint32_t(counter_lo >> 32);
  uint32_t c2 = uint32_t(counter_hi), c3 = uint32_t(counter_hi >> 32);
  for (int round = 0; round < 10; ++round) {
    uint64_t p0 = uint64_t(kMultiplier0) * c0, p1 = uint64_t(kMultiplier1) * c2;
    uint32_t d0 = uint32_t(p1 >> 32) ^ c1 ^ k0, d2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
    c0 = d0;
    c1 = uint32_t(p1);
    c2 = d2;
    c3 = uint32_t(p0);
    k0 += kWeyl0;
    k1 += kWeyl1;
  }
  return {{c0, c1, c2, c3}};
}

/// The first 64 bits of a block.
constexpr uint64_t low64(const Philox4& p) { return uint64_t(p.v[1]) << 32 | p.v[0]; }

/// The key of the stream that a generator's key (seed, number) names: one of its own, so that
/// streams never meet whatever their counters are.
constexpr uint64_t stream_key(uint64_t seed, uint64_t number) {
  return low64(philox4x32(seed, 0x7465737365726121ull, number));
}

/// A word as a float in [0, 1): its top 24 bits, so every value is exact.
constexpr float uniform_float(uint32_t word) { return float(word >> 8) * 0x1p-24f; }

}  // namespace tessera
