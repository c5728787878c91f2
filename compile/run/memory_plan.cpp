#include "compile/run/memory_plan.h"

#include <algorithm>
#include <numeric>

namespace tessera::compiler {
namespace {

size_t aligned(size_t bytes) { return (bytes + kArenaAlign - 1) & ~(kArenaAlign - 1); }

struct Placed {
  size_t begin, end;
  int first, last;
};

// The beginning of the smallest gap of at least `bytes` between those blocks of `placed` (sorted by
// offset) that are in use at the same time as `b`; their end where there is no such gap.
size_t best_gap(const std::vector<Placed>& placed, const Block& b, size_t bytes) {
  size_t end = 0, best = 0, best_gap = size_t(-1);
  for (const Placed& p : placed) {
    if (p.last < b.first || b.last < p.first) continue;
    if (p.begin >= end + bytes && p.begin - end < best_gap) best = end, best_gap = p.begin - end;
    end = std::max(end, p.end);
  }
  return best_gap == size_t(-1) ? end : best;
}

void place(std::vector<Placed>& placed, const Block& b, size_t begin) {
  auto at = std::upper_bound(placed.begin(), placed.end(), begin,
                             [](size_t offset, const Placed& p) { return offset < p.begin; });
  placed.insert(at, {begin, begin + aligned(b.bytes), b.first, b.last});
}

std::vector<size_t> by_size(std::span<const Block> blocks) {
  std::vector<size_t> order(blocks.size());
  std::iota(order.begin(), order.end(), size_t(0));
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return blocks[a].bytes > blocks[b].bytes; });
  return order;
}

}  // namespace

ArenaLayout lay_out(std::span<const Block> blocks) {
  ArenaLayout layout;
  layout.offsets.resize(blocks.size());
  std::vector<Placed> placed;  // by offset
  placed.reserve(blocks.size());
  for (size_t i : by_size(blocks)) {
    const Block& b = blocks[i];
    size_t bytes = aligned(b.bytes);
    if (bytes == 0) continue;
    size_t begin = best_gap(placed, b, bytes);
    layout.offsets[i] = begin;
    layout.bytes = std::max(layout.bytes, begin + bytes);
    place(placed, b, begin);
  }
  return layout;
}

std::vector<size_t> fill_gaps(std::span<const Block> blocks, const ArenaLayout& layout,
                              std::span<const Block> others) {
  std::vector<Placed> placed;  // by offset
  placed.reserve(blocks.size() + others.size());
  for (size_t i = 0; i < blocks.size(); ++i)
    if (blocks[i].bytes) place(placed, blocks[i], layout.offsets[i]);
  std::vector<size_t> offsets(others.size(), kNoRoom);
  for (size_t i : by_size(others)) {
    size_t bytes = aligned(others[i].bytes), begin = best_gap(placed, others[i], bytes);
    if (bytes == 0 || begin + bytes > layout.bytes) continue;
    offsets[i] = begin;
    place(placed, others[i], begin);
  }
  return offsets;
}

size_t peak_of(std::span<const Block> blocks) {
  int steps = 0;
  for (const Block& b : blocks) steps = std::max(steps, b.last + 1);
  std::vector<size_t> begins(size_t(steps) + 1), ends(size_t(steps) + 1);
  for (const Block& b : blocks) {
    begins[size_t(b.first)] += aligned(b.bytes);
    ends[size_t(b.last) + 1] += aligned(b.bytes);
  }
  size_t live = 0, peak = 0;
  for (size_t s = 0; s < begins.size(); ++s) {
    live = live + begins[s] - ends[s];
    peak = std::max(peak, live);
  }
  return peak;
}

}  // namespace tessera::compiler
