// Philox against the known-answer vectors published with Random123 (kat_vectors, philox 4x32 10).
#include "core/tensor/philox.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "core/backend/cpu/isa.h"

namespace tessera {
namespace {

constexpr bool equal(Philox4 p, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return p.v[0] == a && p.v[1] == b && p.v[2] == c && p.v[3] == d;
}

// The function must stay usable in constant expressions.
static_assert(equal(philox4x32(0, 0, 0), 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8));

TEST(Philox, KnownAnswers) {
  EXPECT_TRUE(
      equal(philox4x32(~0ull, ~0ull, ~0ull), 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd));
  EXPECT_TRUE(equal(philox4x32(0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88),
                    0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1));
}

TEST(Philox, KeyAndBothCounterHalvesMatter) {
  std::set<uint64_t> seen;
  for (uint64_t i = 0; i < 64; ++i) {
    seen.insert(low64(philox4x32(i, 0, 0)));
    if (i) seen.insert(low64(philox4x32(0, i, 0)));
    if (i) seen.insert(low64(philox4x32(0, 0, i)));
  }
  EXPECT_EQ(seen.size(), 64u + 63 + 63);
}

TEST(Philox, UniformFloatIsBelowOne) {
  EXPECT_EQ(uniform_float(0), 0.0f);
  EXPECT_LT(uniform_float(~0u), 1.0f);
}

// Kernels draw several blocks at once: all numbers of blocks, and counters that carry.
TEST(Philox, KernelsDrawTheSameWords) {
  std::vector<const cpu::RandomTable*> tables{&cpu::simd<cpu::RandomTable>()};
#if defined(__x86_64__) && !defined(TESSERA_ONLY_ISA)
  tables.push_back(&cpu::isa_table<cpu::RandomTable, cpu::isa::base>());
  if (cpu::current_isa() >= cpu::Isa::kV3)
    tables.push_back(&cpu::isa_table<cpu::RandomTable, cpu::isa::v3>());
#endif
  constexpr uint64_t kKey = 0x299f31d0a4093822, kHigh = 0x0370734413198a2e;
  for (const cpu::RandomTable* table : tables)
    for (uint64_t first : {uint64_t(0), uint64_t(0xfffffff0), ~uint64_t(0) - 20})
      for (int64_t blocks = 0; blocks <= 70; ++blocks) {
        std::vector<uint32_t> words(size_t(4 * blocks + 1), 77);
        table->words(kKey, kHigh, first, blocks, words.data());
        for (int64_t b = 0; b < blocks; ++b) {
          const uint32_t* w = &words[size_t(4 * b)];
          ASSERT_TRUE(equal(philox4x32(kKey, kHigh, first + uint64_t(b)), w[0], w[1], w[2], w[3]))
              << blocks << ' ' << b;
        }
        ASSERT_EQ(words.back(), 77u) << "written beyond " << blocks;
      }
}

}  // namespace
}  // namespace tessera
