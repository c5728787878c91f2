#include "compile/passes/loop_order.h"

#include <algorithm>
#include <bit>

#include "core/base/boundary.h"

namespace tessera::compiler {
namespace {

// All accesses of the body: results first, then operands, and in each list those that vary most
// first.
std::vector<Access*> accesses_of(Body& b) {
  std::vector<Access*> list;
  for (Store& s : b.stores) list.push_back(&s.to);
  for (Access& a : b.operands) list.push_back(&a);
  auto varies = [](const Access* a) {
    return std::ranges::count_if(a->strides, [](int64_t s) { return s != 0; });
  };
  std::stable_sort(list.begin(), list.end(),
                   [&](auto* a, auto* b) { return varies(a) > varies(b); });
  return list;
}

LoopMask renamed(LoopMask mask, const std::vector<int>& to) {
  LoopMask out = 0;
  for (size_t l = 0; l < to.size(); ++l)
    if (mask >> l & 1) out |= LoopMask(1) << to[l];
  return out;
}

// Turns loop l into loop to[l]. Loops that become one have the strides of the innermost of them.
void rename(Body& b, const std::vector<int>& to, const std::vector<bool>& keeps_stride, size_t n) {
  SmallVector<int64_t, 6> extents(n, 1);
  for (size_t l = 0; l < to.size(); ++l) extents[size_t(to[l])] *= b.extents[l];
  b.extents = extents;
  for (Access* a : accesses_of(b)) {
    SmallVector<int64_t, 6> strides(n, 0);
    for (size_t l = 0; l < to.size(); ++l)
      if (keeps_stride[l]) strides[size_t(to[l])] = a->strides[l];
    a->strides = strides;
  }
  for (Instr& i : b.instrs) {
    i.loops = renamed(i.loops, to), i.reduced = renamed(i.reduced, to);
    if (i.kind == InstrKind::kIndex) i.loop = to[size_t(i.loop)];
  }
}

void sort_loops(Body& b) {
  std::vector<Access*> accesses = accesses_of(b);
  std::vector<int> order;  // outermost first
  auto before = [&](int x, int y) {
    for (const Access* a : accesses) {
      int64_t s = a->strides[size_t(x)], t = a->strides[size_t(y)];
      if (s != 0 && t != 0 && s != t) return s > t;
    }
    return false;
  };
  for (int l = 0; l < int(b.extents.size()); ++l) {
    size_t at = order.size();
    while (at > 0 && before(l, order[at - 1])) --at;
    order.insert(order.begin() + int64_t(at), l);
  }
  std::vector<int> to(order.size());
  for (size_t i = 0; i < order.size(); ++i) to[size_t(order[i])] = int(i);
  rename(b, to, std::vector<bool>(to.size(), true), to.size());
}

bool belong_together(Body& b, size_t outer) {
  size_t inner = outer + 1;
  for (const Access* a : accesses_of(b))
    if (a->strides[outer] != b.extents[inner] * a->strides[inner]) return false;
  auto both = [&](LoopMask m) { return (m >> outer & 1) == (m >> inner & 1); };
  for (const Instr& i : b.instrs) {
    if (!both(i.loops) || !both(i.reduced)) return false;
    if (i.kind == InstrKind::kIndex && (i.loop == int(outer) || i.loop == int(inner))) return false;
  }
  return true;
}

}  // namespace

void order_loops(Body& b) {
  if (b.extents.empty()) return;
  sort_loops(b);
  for (size_t outer = b.extents.size() - 1; outer-- > 0;) {
    if (!belong_together(b, outer)) continue;
    std::vector<int> to;
    std::vector<bool> keeps_stride(b.extents.size(), true);
    for (size_t l = 0; l < b.extents.size(); ++l) to.push_back(int(l > outer ? l - 1 : l));
    keeps_stride[outer] = false;
    rename(b, to, keeps_stride, b.extents.size() - 1);
  }
}

namespace {

// The most elements of a row that is swept more than once, so that it comes from a cache the second
// time.
constexpr int64_t kMaxRow = limit("generated.row");

bool fits_rows(const Body& b, LoopMask rows) {
  std::vector<bool> late(b.instrs.size());
  bool within_rows = false;
  for (size_t k = 0; k < b.instrs.size(); ++k) {
    const Instr& i = b.instrs[k];
    for (InstrId id : i.in) late[k] = late[k] || late[size_t(id)];
    if (i.kind == InstrKind::kReduce && (late[k] || (i.reduced & rows) != 0)) {
      if (late[k] || (rows & ~i.reduced) != 0) return false;
      late[k] = true;
    } else if (i.kind == InstrKind::kReduce) {
      within_rows = true;
    }
    if (late[k] && (i.loops & rows) != 0) return false;
  }
  int64_t row = 1;
  for (size_t l = 0; l < b.extents.size(); ++l)
    if (!(rows >> l & 1)) row *= b.extents[l];
  if (within_rows) meet("generated.row", row);
  return !within_rows || row <= kMaxRow;
}

}  // namespace

bool one_sweep(const Body& b) {
  for (LoopMask rows = 0; rows < LoopMask(1) << b.extents.size(); ++rows)
    if (fits_rows(b, rows)) return true;
  return false;
}

}  // namespace tessera::compiler
