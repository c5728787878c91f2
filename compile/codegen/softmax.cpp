#include "compile/codegen/softmax.h"

#include <algorithm>

#include "core/base/boundary.h"
#include "core/primitive/traits.h"

namespace tessera::compiler {

// exp(x - amax(x)) in float32: its operand is never above 0, so exp needs no care for large
// results.
static bool is_exp_below_max(const Schedule& s, InstrId id) {
  const Instr& i = s.instr(id);
  if (i.kind != InstrKind::kPointwise || i.op != "exp" || i.dtype != kF32) return false;
  const Instr& d = s.instr(i.in[0]);
  if (d.kind != InstrKind::kPointwise || d.op != "sub") return false;
  const Instr& m = s.instr(d.in[1]);
  return m.kind == InstrKind::kReduce && m.reduce == ReduceKind::kMax && m.in[0] == d.in[0];
}

bool is_softmax_exp(const Schedule& s, InstrId id) {
  if (!is_exp_below_max(s, id)) return false;
  const LoopMask row = s.instr(s.instr(s.instr(id).in[0]).in[1]).reduced;
  const auto sums = [&](InstrId k) {  // at least 1, if it is over the whole row
    const Instr& i = s.instr(k);
    return i.kind == InstrKind::kReduce && i.reduce == ReduceKind::kSum && i.in[0] == id &&
           within(row, i.reduced);
  };
  const auto is = [&](InstrId k, const char* op) {
    return s.instr(k).kind == InstrKind::kPointwise && s.instr(k).op == op;
  };
  const auto divides = [&](InstrId k) {
    const auto& in = s.instr(k).in;
    const auto one_by_sum = [&](InstrId x) {
      return is(x, "reciprocal") && sums(s.instr(x).in[0]);
    };
    return (is(k, "div") && sums(in[1])) ||
           (is(k, "mul") && (one_by_sum(in[0]) || one_by_sum(in[1])));
  };
  for (InstrId k = id + 1; k < InstrId(s.values.size()); ++k) {
    const bool reads = s.at(k).used && std::ranges::count(s.instr(k).in, id) > 0;
    if (reads && !sums(k) && !divides(k)) return false;
  }
  return std::ranges::none_of(s.body.stores, [&](const Store& t) { return t.value == id; });
}

bool is_softmax_sum(const Schedule& s, InstrId id) {
  const Instr& i = s.instr(id);
  return i.kind == InstrKind::kReduce && i.reduce == ReduceKind::kSum &&
         s.at(id).place == Place::kRow && is_exp_below_max(s, i.in[0]);
}

// Follows all values that depend on the maximum or on the sum. A value of arithmetic on the sum is
// NaN if the sum is. A value that depends on the maximum but not on the sum must not be a result.
bool may_pass_over_nan(const Schedule& s, InstrId max) {
  const Instr& m = s.instr(max);
  if (m.kind != InstrKind::kReduce || m.reduce != ReduceKind::kMax ||
      s.at(max).place != Place::kRow)
    return false;
  enum Follows : uint8_t { kNothing, kMax, kSum };
  std::vector<Follows> of(s.values.size(), kNothing);
  of[size_t(max)] = kMax;
  for (size_t k = size_t(max) + 1; k < of.size(); ++k) {
    const Instr& i = s.instr(InstrId(k));
    if (!s.values[k].used) continue;
    if (is_softmax_sum(s, InstrId(k)) && s.instr(s.instr(i.in[0]).in[0]).in[1] == max &&
        i.reduced == m.reduced) {
      of[k] = kSum;
      continue;
    }
    const bool keeps =
        i.kind == InstrKind::kPointwise && is_floating(i.dtype) && op_info(i.op).traits.keeps_nan;
    auto reads = [&](Follows f) {
      return std::ranges::any_of(i.in, [&](InstrId x) { return of[size_t(x)] == f; });
    };
    of[k] = keeps && reads(kSum) ? kSum : reads(kMax) ? kMax : kNothing;
  }
  return std::ranges::count(of, kSum) > 0 &&
         std::ranges::none_of(s.body.stores,
                              [&](const Store& store) { return of[size_t(store.value)] == kMax; });
}

// The number of elements in a piece: about 8 KiB of floats, but not whole pages, since two pieces
// are read and one is written in each step. The last piece should be whole: for the elements it
// lacks, the next row's first piece runs alone.
static int64_t piece_of(int64_t row) {
  constexpr int64_t kLeastPiece = 1792, kMostPiece = 2304, kPage = 1024;
  const auto lacks = [=](int64_t size) { return (row + size - 1) / size * size - row; };
  int64_t best = kLeastPiece;
  for (int64_t size = kLeastPiece; size <= kMostPiece; size += kMaxLanes)
    if (size % kPage != 0 && lacks(size) < lacks(best)) best = size;
  return best;
}

Pieces softmax_pieces(const Schedule& s) {
  constexpr int64_t kLongRow = limit("generated.softmax");  // elements
  if (s.nests.size() == 3) meet("generated.softmax", s.count(s.inner_mask()));
  if (s.nests.size() != 3 || s.count(s.inner_mask()) < kLongRow) return {};
  const Nest &first = s.nests[0], &second = s.nests[1], &last = s.nests[2];
  if (first.reductions.size() != 1 || second.reductions.size() != 1 || !last.reductions.empty() ||
      !first.stores.empty() || !second.stores.empty())
    return {};
  const InstrId max = first.reductions[0], sum = second.reductions[0];
  if (!is_softmax_sum(s, sum) || !may_pass_over_nan(s, max)) return {};
  const InstrId e = s.instr(sum).in[0], below = s.instr(e).in[0];
  if (s.instr(below).in[1] != max || !s.at(e).buffered) return {};
  for (size_t k = 0; k < s.values.size(); ++k) {
    const InstrId id = InstrId(k);
    const Instr& i = s.instr(id);
    if (!s.values[k].used) continue;
    auto reads = [&](InstrId x) { return std::ranges::count(i.in, x) > 0; };
    const bool divides = i.kind == InstrKind::kPointwise && i.op == "div" && i.in[1] == sum;
    if (reads(below) && id != e) return {};
    if (reads(e) && id != sum && !(divides && i.in[0] == e)) return {};
    // Values of an element know only the maximum and the sum of their piece.
    if (s.values[k].place != Place::kElement) continue;
    if (reads(max) && id != below) return {};
    if (reads(sum) && !(divides && i.in[0] == e)) return {};
    for (InstrId x : i.in)
      if (s.at(x).place == Place::kRow && s.at(x).stage > 0 && x != max && x != sum) return {};
  }
  for (const Store& store : s.body.stores)
    if (store.value == e || store.value == below) return {};
  for (int k : last.stores) {
    const Placed& p = s.at(s.body.stores[size_t(k)].value);
    if (p.place == Place::kRow && p.stage > 0) return {};
  }
  return {max, sum, piece_of(s.count(s.inner_mask()))};
}

}  // namespace tessera::compiler
