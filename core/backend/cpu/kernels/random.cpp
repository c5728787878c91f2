// Philox words and Box-Muller normals in loops that vectorise: the block number is the lane.
#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/kernels/tables.h"
#include "core/backend/cpu/kernels/vector.h"
// Each text needs the one before it.
// clang-format off
#include "core/ops/functors/prelude.h"
#include "core/ops/functors/math.h"
#include "core/ops/functors/math_trig.h"
// clang-format on

namespace tessera::cpu {
namespace {

typedef uint64_t Longs __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
constexpr int kLongs = kVectorBytes / 8;

// The product of the low halves of lanes and b. Masked as in vector.h.
inline Longs low_product(Longs a, uint32_t b) {
#if defined(__AVX512F__)
  return Longs(_mm512_maskz_mul_epu32(0xff, __m512i(a), _mm512_set1_epi64(int64_t(b))));
#elif defined(__AVX2__)
  return Longs(_mm256_mul_epu32(__m256i(a), _mm256_set1_epi64x(int64_t(b))));
#elif defined(__x86_64__)
  return Longs(_mm_mul_epu32(__m128i(a), _mm_set1_epi64x(int64_t(b))));
#else
  return (a & 0xffffffffu) * uint64_t(b);
#endif
}

// Words of N kLongs blocks, as core/tensor/philox.h has them. A lane has a block, and in its low
// half a word: what products leave in the high half never reaches a low one. N vectors at once hide
// the time that a product takes.
template <int N>
void blocks_of_words(uint64_t key, uint64_t counter_hi, uint64_t first, uint32_t* out) {
  Longs c0[N], c1[N], c2[N], c3[N];
  for (int n = 0; n < N; ++n) {
    for (int i = 0; i < kLongs; ++i) c0[n][i] = first + uint64_t(n * kLongs + i);
    c1[n] = c0[n] >> 32, c2[n] = counter_hi - Longs{}, c3[n] = (counter_hi >> 32) - Longs{};
  }
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
    for (int n = 0; n < N; ++n) {
      const Longs p0 = low_product(c0[n], 0xD2511F53u), p1 = low_product(c2[n], 0xCD9E8D57u);
      c0[n] = p1 >> 32 ^ c1[n] ^ uint64_t(k0), c2[n] = p0 >> 32 ^ c3[n] ^ uint64_t(k1);
      c1[n] = p1, c3[n] = p0;
    }
  for (int n = 0; n < N; ++n) {
    const Longs low = (c0[n] & 0xffffffffu) | c1[n] << 32,
                high = (c2[n] & 0xffffffffu) | c3[n] << 32;
#if defined(__AVX512F__)
    const Longs pairs[] = {__builtin_shufflevector(low, high, 0, 8, 1, 9, 2, 10, 3, 11),
                           __builtin_shufflevector(low, high, 4, 12, 5, 13, 6, 14, 7, 15)};
#elif defined(__AVX2__)
    const Longs pairs[] = {__builtin_shufflevector(low, high, 0, 4, 1, 5),
                           __builtin_shufflevector(low, high, 2, 6, 3, 7)};
#else
    const Longs pairs[] = {__builtin_shufflevector(low, high, 0, 2),
                           __builtin_shufflevector(low, high, 1, 3)};
#endif
    __builtin_memcpy(out + 4 * n * kLongs, pairs, sizeof(pairs));
  }
}

void words(uint64_t key, uint64_t counter_hi, uint64_t first, int64_t blocks, uint32_t* out) {
  constexpr int kVectors = 4;
  constexpr int64_t kStep = kVectors * kLongs;
  int64_t b = 0;
  for (; b + kStep <= blocks; b += kStep)
    blocks_of_words<kVectors>(key, counter_hi, first + uint64_t(b), out + 4 * b);
  for (; b < blocks; b += kLongs) {
    uint32_t some[4 * kLongs];
    blocks_of_words<1>(key, counter_hi, first + uint64_t(b), some);
    const int64_t n = blocks - b < kLongs ? blocks - b : kLongs;
    __builtin_memcpy(out + 4 * b, some, size_t(n) * 4 * sizeof(uint32_t));
  }
}

// Box, Muller 1958: r = sqrt(-2 log u), then r cos and r sin of a uniform angle. u in (0, 1].
void normals(const uint32_t* w, float* out, int64_t pairs) {
#pragma GCC ivdep
  for (int64_t i = 0; i < pairs; ++i) {
    float u = (float(w[2 * i] >> 8) + 1.0f) * 0x1p-24f,
          angle = float(w[2 * i + 1] >> 8) * (0x1p-24f * 6.283185307f);
    float r = fn::sqrt(-2.0f * fn::log(u));
    out[2 * i] = r * fn::cos(angle), out[2 * i + 1] = r * fn::sin(angle);
  }
}

}  // namespace

template <>
const RandomTable& isa_table<RandomTable, isa::TESSERA_ISA>() {
  static const RandomTable table{words, normals};
  return table;
}

}  // namespace tessera::cpu
