#include "compile/codegen/loops.h"

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>

namespace tessera::compiler {
namespace {

// to[l] is the new loop that old loop l becomes, -1 where it is dropped (its extent is 1), or
// kMerged + m where it is merged into loop m as the outer part.
constexpr int kMerged = 100;

Access remap(const Access& a, const std::vector<int>& to, size_t loops) {
  Access r{a.dtype, {}};
  r.strides.resize(loops);
  for (size_t l = 0; l < to.size(); ++l)
    if (to[l] >= 0 && to[l] < kMerged) r.strides[size_t(to[l])] = a.strides[l];
  return r;
}
LoopMask remap(LoopMask m, const std::vector<int>& to) {
  LoopMask r = 0;
  for (size_t l = 0; l < to.size(); ++l)
    if (m >> l & 1 && to[l] >= 0) r |= 1u << (to[l] % kMerged);
  return r;
}

// A reduction over nothing keeps the value; any and all ask whether it is zero.
void make_cast(Instr& i) {
  i.kind = InstrKind::kCast;
  i.reduced = 0;
}

Body remap(const Body& body, const std::vector<int>& to, size_t loops) {
  Body r;
  r.extents.resize(loops, 1);
  for (size_t l = 0; l < to.size(); ++l)
    if (to[l] >= 0) r.extents[size_t(to[l] % kMerged)] *= body.extents[l];
  for (const Access& a : body.operands) r.operands.push_back(remap(a, to, loops));
  for (const Store& s : body.stores) r.stores.push_back({s.value, remap(s.to, to, loops)});
  r.instrs = body.instrs;
  for (Instr& i : r.instrs) {
    i.loops = remap(i.loops, to), i.reduced = remap(i.reduced, to);
    if (i.kind == InstrKind::kReduce && i.reduced == 0) make_cast(i);
    if (i.kind != InstrKind::kIndex) continue;
    i.loop = to[size_t(i.loop)];
    if (i.loop < 0) i.kind = InstrKind::kConstant, i.value = 0, i.loop = 0;
  }
  return r;
}

// True if every access, index and reduction treats loops l and l + 1 as one.
bool mergeable(const Body& b, int l) {
  auto joined = [&](const Access& a) {
    return a.strides[size_t(l)] == a.strides[size_t(l) + 1] * b.extents[size_t(l) + 1];
  };
  auto both = [&](LoopMask m) { return (m >> l & 1) == (m >> (l + 1) & 1); };
  for (const Access& a : b.operands)
    if (!joined(a)) return false;
  for (const Store& s : b.stores)
    if (!joined(s.to)) return false;
  for (const Instr& i : b.instrs)
    if (i.kind == InstrKind::kIndex ? i.loop == l || i.loop == l + 1
                                    : !both(i.reduced) || !both(i.loops))
      return false;
  return true;
}

Body merged(Body b, int& outer) {
  for (int l = int(b.extents.size()) - 2; l >= 0; --l) {
    if (l + 1 == outer || !mergeable(b, l)) continue;
    std::vector<int> to(b.extents.size());
    for (int k = 0; k < int(to.size()); ++k) to[size_t(k)] = k <= l ? k : k - 1;
    to[size_t(l)] = kMerged + l;
    b = remap(b, to, to.size() - 1);
    if (l < outer) --outer;
  }
  return b;
}

// The outer loops come first, then the inner ones, each kind by falling strides of the largest
// result; the vector loop comes last.
std::vector<int> loop_order(const Body& b, LoopMask inner, int vector) {
  const Access* main = &b.stores[0].to;
  for (const Store& s : b.stores)
    if (count_loops(b, moving_loops(s.to)) > count_loops(b, moving_loops(*main))) main = &s.to;
  std::vector<int> order(b.extents.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int x, int y) {
    auto key = [&](int l) {
      return std::array<int64_t, 3>{int64_t(inner >> l & 1), int64_t(l == vector),
                                    -main->strides[size_t(l)]};
    };
    return key(x) < key(y);
  });
  return order;
}

}  // namespace

LoopMask moving_loops(const Access& a) {
  LoopMask m = 0;
  for (size_t l = 0; l < a.strides.size(); ++l)
    if (a.strides[l] != 0) m |= 1u << l;
  return m;
}

int64_t count_loops(const Body& b, LoopMask mask) {
  int64_t n = 1;
  for (size_t l = 0; l < b.extents.size(); ++l)
    if (mask >> l & 1) n *= b.extents[l];
  return n;
}

Body without_single_loops(const Body& body) {
  std::vector<int> to;
  int n = 0;
  for (int64_t extent : body.extents) to.push_back(extent == 1 ? -1 : n++);
  return remap(body, to, size_t(n));
}

int vector_loop(const Body& b) {
  std::vector<double> weight(b.extents.size());
  auto add = [&](const Access& a, double w) {
    double bytes = double(count_loops(b, moving_loops(a))) * double(size_of(a.dtype));
    for (size_t l = 0; l < weight.size(); ++l)
      if (a.strides[l] == 1) weight[l] += w * bytes;
  };
  for (const Access& a : b.operands) add(a, 1);
  for (const Store& s : b.stores) add(s.to, 1.01);
  int best = int(weight.size()) - 1;
  for (int l = best; l >= 0; --l)
    if (weight[size_t(l)] > weight[size_t(best)]) best = l;
  return best;
}

LoopMask inner_loops(const Body& b, int vector) {
  const LoopMask all = (LoopMask(1) << b.extents.size()) - 1, v = 1u << vector;
  LoopMask inner = v, before = 0;
  while (inner != before) {
    before = inner;
    for (const Instr& i : b.instrs) {
      if (i.kind != InstrKind::kReduce || within(i.reduced, inner)) continue;
      bool by_chunks = within(i.loops, inner) && within(all & ~inner, i.reduced);
      if (i.reduced & v ? i.loops != 0 : !by_chunks) inner |= i.reduced;
    }
  }
  return inner;
}

Body in_order(const Body& body, LoopMask inner, int vector, int& outer) {
  std::vector<int> order = loop_order(body, inner, vector), to(order.size());
  for (size_t k = 0; k < order.size(); ++k) to[size_t(order[k])] = int(k);
  outer = int(order.size()) - std::popcount(inner);
  return merged(remap(body, to, order.size()), outer);
}

}  // namespace tessera::compiler
