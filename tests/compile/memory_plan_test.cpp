// Layouts of random sets of blocks: blocks in use together do not overlap, and little is wasted.
#include "compile/run/memory_plan.h"

#include <gtest/gtest.h>

#include <random>

namespace tessera::compiler {
namespace {

void check_layout(const std::vector<Block>& blocks, const ArenaLayout& layout) {
  ASSERT_EQ(layout.offsets.size(), blocks.size());
  EXPECT_GE(layout.bytes, peak_of(blocks));
  for (size_t i = 0; i < blocks.size(); ++i) {
    const Block& a = blocks[i];
    EXPECT_EQ(layout.offsets[i] % kArenaAlign, 0u);
    EXPECT_LE(layout.offsets[i] + a.bytes, layout.bytes);
    for (size_t j = 0; j < i; ++j) {
      const Block& b = blocks[j];
      bool together = a.first <= b.last && b.first <= a.last;
      bool apart = layout.offsets[i] + a.bytes <= layout.offsets[j] ||
                   layout.offsets[j] + b.bytes <= layout.offsets[i];
      EXPECT_TRUE(!together || apart || a.bytes == 0 || b.bytes == 0)
          << "blocks " << i << " and " << j;
    }
  }
}

TEST(MemoryPlan, RandomBlocks) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 300; ++round) {
    std::vector<Block> blocks(random() % 80);
    int steps = 1 + int(random() % 60);
    for (Block& b : blocks) {
      b.bytes = random() % 5 == 0 ? 0 : size_t(1) << random() % 14;
      b.bytes += random() % (b.bytes + 1);
      b.first = int(random() % uint64_t(steps));
      b.last = b.first + int(random() % uint64_t(steps - b.first));
    }
    check_layout(blocks, lay_out(blocks));
    const auto half = std::ptrdiff_t(blocks.size() / 2);
    std::vector<Block> first(blocks.begin(), blocks.begin() + half),
        others(blocks.begin() + half, blocks.end());
    ArenaLayout both = lay_out(first);
    std::vector<size_t> offsets = fill_gaps(first, both, others);
    for (size_t i = 0; i < offsets.size(); ++i)
      if (offsets[i] != kNoRoom) first.push_back(others[i]), both.offsets.push_back(offsets[i]);
    check_layout(first, both);
  }
}

TEST(MemoryPlan, GapsAreFilledWithoutGrowing) {
  // Between the 512 bytes of steps 2 and 6 there is room for 448 and 64; not for 128 beside them.
  std::vector<Block> blocks = {{512, 0, 2}, {512, 6, 9}},
                     others = {{64, 3, 5}, {448, 4, 5}, {128, 5, 5}, {64, 2, 3}, {0, 4, 4}};
  ArenaLayout layout = lay_out(blocks);
  ASSERT_EQ(layout.bytes, 512u);
  std::vector<size_t> offsets = fill_gaps(blocks, layout, others), none{kNoRoom};
  EXPECT_EQ(offsets[1], 0u);
  EXPECT_EQ(offsets[0], 448u);
  for (size_t i : {2u, 3u, 4u}) EXPECT_EQ(offsets[i], kNoRoom) << i;
  EXPECT_EQ(fill_gaps({}, {}, std::vector{others[0]}), none);
}

TEST(MemoryPlan, NothingIsWastedWhereNothingNeedBe) {
  // Forward values of falling size, each read once more on the way back.
  std::vector<Block> nested, chain, equal;
  for (int i = 0; i < 20; ++i) {
    nested.push_back({size_t(64) << i, i, 40 - i});
    chain.push_back({size_t(6400), i, i + 1});
    equal.push_back({size_t(100), i, i + 5});
  }
  for (auto* blocks : {&nested, &chain, &equal}) {
    ArenaLayout layout = lay_out(*blocks);
    check_layout(*blocks, layout);
    EXPECT_EQ(layout.bytes, peak_of(*blocks));
  }
  EXPECT_EQ(lay_out(chain).bytes, 2 * 6400u);
  EXPECT_EQ(lay_out(equal).bytes, 6 * 128u);
}

TEST(MemoryPlan, TheSmallestGapThatFits) {
  // Gaps of 192 and 128 bytes between blocks that stay: 128 bytes go into the second.
  std::vector<Block> blocks = {{1024, 0, 9}, {192, 0, 4}, {512, 0, 9}, {128, 0, 4},
                               {64, 0, 9},   {128, 5, 9}, {192, 5, 9}};
  ArenaLayout layout = lay_out(blocks);
  check_layout(blocks, layout);
  EXPECT_EQ(layout.bytes, peak_of(blocks));
}

TEST(MemoryPlan, Empty) {
  EXPECT_EQ(lay_out({}).bytes, 0u);
  EXPECT_EQ(peak_of({}), 0u);
}

}  // namespace
}  // namespace tessera::compiler
