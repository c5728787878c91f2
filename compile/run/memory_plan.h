// Places blocks of memory with known lifetimes in one arena. Invariant: blocks that are in use at
// the same step do not overlap, and each begins at a multiple of kArenaAlign.
#pragma once
#include <cstddef>
#include <span>
#include <vector>

namespace tessera::compiler {

inline constexpr size_t kArenaAlign = 64;  // bytes

struct Block {
  size_t bytes = 0;
  int first = 0, last = 0;  // steps between which it is in use, both included
};

struct ArenaLayout {
  std::vector<size_t> offsets;  // of the blocks, in their order
  size_t bytes = 0;             // of the arena
};

/// Greedy offset calculation by size: from the largest block to the smallest, each goes into the
/// smallest gap that fits it between the blocks placed before it that are in use at the same time,
/// or behind them (Pisarchyk and Lee 2020, "Efficient Memory Management for Deep Neural Net
/// Inference", algorithm 3). It is quadratic in the number of blocks.
ArenaLayout lay_out(std::span<const Block> blocks);

/// Places each of `others`, from the largest to the smallest, in a gap between `blocks`, which lie
/// as `layout` says, without making the arena larger. kNoRoom for those that do not fit.
std::vector<size_t> fill_gaps(std::span<const Block> blocks, const ArenaLayout& layout,
                              std::span<const Block> others);
inline constexpr size_t kNoRoom = size_t(-1);

/// The most bytes in use at one step, which no layout can be smaller than.
size_t peak_of(std::span<const Block> blocks);

}  // namespace tessera::compiler
