#include "compile/codegen/gpu_layout.h"

#include <algorithm>
#include <bit>

namespace tessera::compiler {
namespace {

constexpr int kWarpThreads = 32;
constexpr int64_t kWarpColumns = 1024;  // the longest row that a warp takes
constexpr int kMostWidth = 8;           // elements of a pack
constexpr int kMostHeld = 32;           // elements of a row that a thread holds
// Rows of a unit that sums over rows: many enough for few partial results, few enough for sums in
// single precision, of columns and of everything.
constexpr int64_t kLeastRows = 8, kMostUnitsOfRows = 512, kMostRows = 256, kMostRowsOfTotals = 64;
constexpr int64_t kOneRow = 1 << 16;  // the longest row if there is no other: one block takes it
constexpr int kPacksOfTotals = 4;     // of a thread where only totals are kept

// Registers of 4 bytes that a thread of a block of `threads` may hold across nests. A card has
// 65,536 for all threads of a block.
int register_budget(int threads) { return threads >= 1024 ? 20 : threads >= 512 ? 56 : 64; }

bool by_chunks(const Schedule& s, InstrId id) {
  return s.at(id).used && s.at(id).reduce == ReduceAs::kChunk;
}
bool inside_rows(const Schedule& s, InstrId id) {
  return s.at(id).used && s.at(id).reduce == ReduceAs::kRow;
}

int pack_width(const Schedule& s) {
  if (s.loops() == 0) return 1;
  const size_t last = size_t(s.loops()) - 1;
  int width = kMostWidth;
  auto fit = [&](const Access& a) {
    if (a.strides[last] != 1) return;
    width = std::min(width, int(16 / size_of(a.dtype)));
    for (size_t l = 0; l < last; ++l)
      while (a.strides[l] % width != 0) width /= 2;
  };
  for (const Access& a : s.body.operands) fit(a);
  for (const Store& k : s.body.stores) fit(k.to);
  while (s.body.extents[last] % width != 0) width /= 2;
  return width;
}

void visit(const Schedule& s, InstrId id, std::vector<InstrId>& found) {
  if (s.at(id).place != Place::kElement || std::ranges::count(found, id)) return;
  if (s.at(id).reduce == ReduceAs::kNone)
    for (InstrId x : s.instr(id).in) visit(s, x, found);
  found.push_back(id);
}

// Loads that more than one nest over the whole row needs.
std::vector<bool> loads_to_hold(const Schedule& s) {
  std::vector<int> nests(s.values.size());
  for (const Nest& n : s.nests) {
    if (n.loops != s.inner_mask()) continue;
    for (InstrId id : element_values(s, n))
      if (s.instr(id).kind == InstrKind::kLoad) ++nests[size_t(id)];
  }
  std::vector<bool> held;
  for (int n : nests) held.push_back(n > 1);
  return held;
}

// Registers that a thread needs for each element of a row, in halves.
int halves_held(const Schedule& s, const std::vector<bool>& held) {
  int halves = 0;
  for (size_t k = 0; k < held.size(); ++k) {
    const Instr& i = s.instr(InstrId(k));
    // What is computed of a wide element takes more registers than the element.
    if (held[k]) halves += std::max(1, int(size_of(i.dtype) == 8 ? 8 : size_of(i.dtype) / 2));
    if (by_chunks(s, InstrId(k)) && i.loops != 0)
      halves += i.dtype == kF64 || is_integral(i.dtype) ? 8 : 2;
  }
  return halves;
}

bool hold_rows(const Schedule& s, GpuLayout& g) {
  const int halves = halves_held(s, g.held);
  for (int threads : {kWarpThreads, 128, 256, 512, 1024}) {
    if (threads == kWarpThreads && g.columns > kWarpColumns) continue;
    const int64_t of_all = int64_t(threads) * g.width;
    const int64_t packs = (g.columns + of_all - 1) / of_all;
    if (packs * g.width > kMostHeld || packs * g.width * halves > 2 * register_budget(threads))
      continue;
    g.threads = threads, g.packs = int(packs);
    return true;
  }
  return false;
}

}  // namespace

int64_t GpuLayout::blocks() const {
  if (kind == Kind::kElements) {
    const int64_t all = rows * columns / width;
    return (all + threads - 1) / threads;
  }
  const int64_t of_block = block_threads() / threads;
  return (units() + of_block - 1) / of_block;
}

std::vector<InstrId> element_values(const Schedule& s, const Nest& nest) {
  std::vector<InstrId> found;
  for (InstrId id : nest.reductions) visit(s, s.instr(id).in[0], found);
  for (int k : nest.stores) visit(s, s.body.stores[size_t(k)].value, found);
  std::ranges::sort(found);
  return found;
}

bool in_packs(const Schedule& s, const GpuLayout& layout, const Access& a) {
  return layout.width > 1 && a.strides.back() == 1 && s.loops() > 0;
}

std::optional<GpuLayout> make_gpu_layout(const Schedule& s) {
  const LoopMask inner = s.inner_mask();
  GpuLayout g;
  g.rows = s.count(s.outer_mask()), g.columns = s.count(inner), g.width = pack_width(s);
  if (g.rows * g.columns >= int64_t(1) << 40) return {};
  bool in_rows = false, chunks = false, arrays = false;
  for (size_t k = 0; k < s.values.size(); ++k) {
    const InstrId id = InstrId(k);
    const Instr& i = s.instr(id);
    if (inside_rows(s, id)) {
      if (s.at(id).place == Place::kElement) return {};
      in_rows = true;
    }
    if (!by_chunks(s, id)) continue;
    if (i.loops != 0 && (i.loops != inner || (s.instr(i.in[0]).loops & inner) != inner)) return {};
    chunks = true, arrays = arrays || i.loops != 0;
  }
  for (int k : s.late_stores)
    if (const LoopMask to = moving_loops(s.body.stores[size_t(k)].to); to != 0 && to != inner)
      return {};
  if (!in_rows && !chunks) return g;
  if (chunks)
    g.unit_rows = std::min(g.rows, std::clamp(g.rows / kMostUnitsOfRows, kLeastRows,
                                              arrays ? kMostRows : kMostRowsOfTotals));
  if (!in_rows) {
    g.kind = GpuLayout::Kind::kColumns;
    g.held.assign(s.values.size(), false);
    const bool whole = std::ranges::all_of(s.nests, [&](auto& n) { return n.loops == inner; });
    g.packs = arrays ? 1 : kPacksOfTotals;
    if (g.columns <= kWarpThreads * g.width * g.packs) g.threads = kWarpThreads;
    const int64_t of_all = int64_t(g.threads) * g.width, tile = of_all * g.packs;
    if (whole && !s.nests.empty()) {
      g.tiles = (g.columns + tile - 1) / tile;
    } else if (g.columns > tile) {
      const int64_t packs = (g.columns + of_all - 1) / of_all;
      if (arrays && packs * g.width > kMostHeld) return {};
      g.packs = arrays ? int(packs) : 0;
    }
    return g;
  }
  g.kind = GpuLayout::Kind::kRows;
  g.held = loads_to_hold(s);
  if (hold_rows(s, g)) return g;
  if (arrays || (g.rows == 1 && g.columns > kOneRow)) return {};
  g.threads = g.columns <= 4096 ? 256 : 512, g.packs = 0;
  g.held.assign(s.values.size(), false);
  return g;
}

size_t gpu_scratch_offset(const Schedule& s, const GpuLayout& g, InstrId reduction) {
  constexpr size_t kAlign = 256, kWidest = 8;
  size_t at = 0;
  for (InstrId id = 0; id < reduction; ++id) {
    if (!by_chunks(s, id)) continue;
    const int64_t parts = s.instr(id).loops ? g.groups_of_rows() * g.columns : g.units();
    at += (size_t(parts) * kWidest + kAlign - 1) / kAlign * kAlign;
  }
  return at;
}
size_t gpu_scratch_bytes(const Schedule& s, const GpuLayout& g) {
  return gpu_scratch_offset(s, g, InstrId(s.values.size()));
}

}  // namespace tessera::compiler
