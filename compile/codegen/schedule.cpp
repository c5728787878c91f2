#include "compile/codegen/schedule.h"

#include <algorithm>

#include "compile/codegen/access_order.h"
#include "compile/codegen/expressions.h"
#include "compile/codegen/functors.h"
#include "compile/codegen/generate.h"
#include "compile/codegen/loops.h"
#include "compile/codegen/softmax.h"
#include "compile/codegen/streams.h"
#include "core/base/boundary.h"
#include "core/primitive/traits.h"

namespace tessera::compiler {
namespace {

// The intermediate values of one row may take half of L2.
constexpr int64_t kRowBuffers = 256 << 10;
constexpr int64_t kChunk = 1 << 15;            // least elements of a chunk
constexpr int64_t kChunksOfArrays = 64;        // most chunks, if each keeps partial arrays
constexpr int64_t kChunksOfScalars = 1 << 12;  // most chunks, if each keeps partial sums
constexpr int64_t kLongRow = 64 << 10;         // bytes of an operand's row: twice an L1 cache
constexpr int64_t kChunksBeside = 16;          // most chunks of rows that long
// Distances in bytes at which operands are prefetched. L1 can wait for too few lines at once to
// keep memory busy, so a single operand is first brought into L2: layer_norm gains 9 % on Zen 5, of
// which going from 6.5 KiB to this distance is 3 %; on Zen 4 these were the best of those tried.
// Two or more operands share the lines that L1 can wait for and skip L2: layer_norm's gradient
// gains 5 % this way and loses 10 % through L2. No distance is a whole number of pages, which would
// be slower by a fifth.
constexpr int64_t kAhead = 15 << 9;     // of a single operand, into L1
constexpr int64_t kFarAhead = 36 << 9;  // of a single operand, into L2
constexpr int64_t kEachAhead = 7 << 9;  // of each of several operands, into L1
constexpr int64_t kFetched = 1 << 20;   // fewer bytes of an operand fit into L2
constexpr int kWorkBeside = 10;         // least work of nests that run beside each other
constexpr int kWorthKeeping = 7;  // least cost of a value that is kept instead of computed again
// The most elements of an only row that one thread computes; the fewest of rows whose nests run
// beside each other, and how many such rows a chunk has, if there are as many.
constexpr int64_t kSerial = limit("generated.one_row"), kBesideRow = limit("generated.beside"),
                  kRowsBeside = limit("generated.rows_beside");

int64_t bytes_of(DType t) { return t == kF64 || (is_integral(t) && t != kBool) ? 8 : 4; }

// ---- places of values ----

class Scheduler {
 public:
  Scheduler(const Body& body, int outer, bool may_block, Target target)
      : may_block_(may_block),
        on_cpu_(target == Target::kCpu),
        streamed_from_(on_cpu_ ? streamed_from() : 0) {
    s_.body = body, s_.outer = outer;
    s_.values.resize(body.instrs.size()), s_.streamed.resize(body.stores.size());
    outer_ = s_.outer_mask(), inner_ = s_.inner_mask();
  }

  std::optional<Schedule> run() {
    for (size_t i = 0; i < s_.values.size(); ++i)
      if (!place(InstrId(i))) return std::nullopt;
    for (const Store& s : s_.body.stores) use(s.value);
    for (size_t i = 0; i < s_.body.stores.size(); ++i)
      if (!place_store(int(i))) return std::nullopt;
    feed_reductions();
    if (!cut_rows()) return std::nullopt;
    fill_nests();
    return std::move(s_);
  }

 private:
  Placed& at(InstrId id) { return s_.values[size_t(id)]; }
  const Instr& instr(InstrId id) const { return s_.body.instrs[size_t(id)]; }
  // True for a sum over everything in one flat loop: pieces of the loop are then its rows.
  bool flat_total(const Instr& i) const { return may_block_ && outer_ == 0 && i.loops == 0; }

  bool place(InstrId id) {
    const Instr& i = instr(id);
    Placed& p = at(id);
    bool late = false;
    for (InstrId x : i.in) {
      late |= at(x).place == Place::kLate;
      p.stage = std::max(p.stage, at(x).stage);
    }
    if (i.kind == InstrKind::kReduce) return !late && place_reduce(i, p);
    if (late) {
      p.place = Place::kLate;
      for (InstrId x : i.in)
        if (!at_the_end(x)) return false;
      return within(i.loops, inner_);
    }
    p.place = i.loops & inner_                  ? Place::kElement
              : i.loops & outer_ || p.stage > 0 ? Place::kRow
                                                : Place::kHead;
    return !divides_integers(i);
  }
  bool place_reduce(const Instr& i, Placed& p) {
    if (within(i.reduced, inner_) && !flat_total(i)) {
      p.reduce = on_cpu_ && picks(i) ? ReduceAs::kPick : ReduceAs::kRow, ++p.stage;
      p.place = i.loops & inner_ ? Place::kElement : Place::kRow;
      return holds_totals(i);
    }
    p.reduce = ReduceAs::kChunk, p.place = Place::kLate;
    return within(outer_, i.reduced) && within(i.loops, inner_) && holds_totals(i);
  }
  bool picks(const Instr& i) const {
    if (i.reduce != ReduceKind::kSum || !is_floating(i.dtype) || std::popcount(inner_) != 1 ||
        i.reduced != inner_ || s_.body.extents.back() > INT32_MAX)
      return false;
    const Instr& where = instr(i.in[0]);
    if (where.kind != InstrKind::kPointwise || where.op != "where") return false;
    const Instr &hit = instr(where.in[0]), &x = instr(where.in[1]), &zero = instr(where.in[2]);
    if (hit.kind != InstrKind::kPointwise || hit.op != "eq" || x.kind != InstrKind::kLoad ||
        zero.kind != InstrKind::kConstant || zero.value.real() != 0)
      return false;
    const auto along_the_row = [&](InstrId id) {
      return instr(id).kind == InstrKind::kIndex && instr(id).loops == inner_;
    };
    const auto of_the_row = [&](InstrId id) {
      return s_.at(id).place <= Place::kRow && s_.at(id).stage == 0;
    };
    return (along_the_row(hit.in[0]) && of_the_row(hit.in[1])) ||
           (along_the_row(hit.in[1]) && of_the_row(hit.in[0]));
  }
  bool holds_totals(const Instr& i) {
    const LoopMask kept = i.loops & inner_;
    if (kept) totals_ += s_.count(kept) * bytes_of(i.dtype) / 4;
    meet("generated.totals", totals_);
    return totals_ <= limit("generated.totals");
  }
  // True for what is computed after all chunks: sums over rows, and values that vary with no loop.
  bool at_the_end(InstrId id) const {
    const Instr& i = instr(id);
    if (s_.at(id).place == Place::kLate) return true;
    if (s_.at(id).reduce != ReduceAs::kNone || i.loops & outer_) return false;
    for (InstrId x : i.in)
      if (!at_the_end(x)) return false;
    return true;
  }
  // True for a division of integers by anything but a nonzero constant. It cannot be scheduled: a
  // divisor of zero would have to be refused before the loops run.
  bool divides_integers(const Instr& i) const {
    if (i.kind != InstrKind::kPointwise || !is_integral(i.dtype)) return false;
    if (!op_info(i.op).traits.may_trap) return false;
    const Instr& by = instr(i.in[1]);
    return by.kind != InstrKind::kConstant || by.value.integer() == 0;
  }

  void use(InstrId id) {
    if (std::exchange(at(id).used, true)) return;
    for (InstrId x : instr(id).in) use(x);
  }

  Nest& nest(int stage, LoopMask loops) {
    for (Nest& n : s_.nests)
      if (n.stage == stage && n.loops == loops) return n;
    s_.nests.push_back({.loops = loops, .stage = stage});
    return s_.nests.back();
  }
  bool place_store(int k) {
    const Store& s = s_.body.stores[size_t(k)];
    LoopMask to = moving_loops(s.to);
    const Placed& p = at(s.value);
    if (p.place == Place::kLate) {
      s_.late_stores.push_back(k);
      return to == instr(s.value).loops;
    }
    if (!within(outer_, to)) return false;
    if (to & inner_)
      nest(p.stage, to & inner_).stores.push_back(k);
    else
      s_.row_stores.push_back(k);
    s_.streamed[size_t(k)] = streams(s.to);
    return true;
  }
  bool streams(const Access& to) const {
    if (!on_cpu_ || s_.loops() == 0 || to.strides.back() != 1 ||
        s_.count(moving_loops(to)) * int64_t(size_of(to.dtype)) < streamed_from_)
      return false;
    meet("streams.row", s_.body.extents.back());
    return s_.body.extents.back() >= kStreamedRow;
  }
  void feed_reductions() {
    for (size_t k = 0; k < s_.values.size(); ++k) {
      const Instr& i = instr(InstrId(k));
      if (i.kind != InstrKind::kReduce || !s_.values[k].used) continue;
      if (at(InstrId(k)).reduce == ReduceAs::kPick) continue;
      LoopMask span = (instr(i.in[0]).loops | i.reduced) & inner_;
      if (span)
        nest(at(i.in[0]).stage, span).reductions.push_back(InstrId(k));
      else
        s_.row_reductions.push_back(InstrId(k));
    }
    std::stable_sort(s_.nests.begin(), s_.nests.end(), [](const Nest& a, const Nest& b) {
      return a.stage != b.stage ? a.stage < b.stage : a.loops > b.loops;
    });
  }

  // ---- what each nest computes ----

  void fill_nests() {
    for (size_t n = 0; n < s_.nests.size(); ++n) {
      Nest& nest = s_.nests[n];
      seen_.assign(s_.values.size(), false);
      for (InstrId r : nest.reductions) visit(int(n), instr(r).in[0]);
      for (int k : nest.stores) visit(int(n), s_.body.stores[size_t(k)].value);
      std::sort(nest.values.begin(), nest.values.end());
    }
    beside();
    for (size_t id = 0; id < s_.values.size(); ++id)
      if (s_.values[id].buffered) keep_in_result(InstrId(id));
    look_ahead();
  }
  // If the nests of a row follow each other, each complete before the next, each in turn waits for
  // memory, for execution units, for stores. If they run beside each other, on consecutive rows,
  // their waits overlap. This requires that each buffer of a row is read for the last time by the
  // nest after the one that computes it, just before the next row is written there.
  void beside() {
    const int64_t row = s_.count(inner_),
                  rows = std::max(s_.chunk_rows, std::min(kRowsBeside, s_.rows / kChunksBeside));
    const auto of_rows = [&](const Nest& n) { return n.loops == inner_; };
    const AccessOrder order(s_);
    const auto by_the_next = [&](InstrId id) {
      return order.last_reread_in(id) <= order.computed_in(id) + 1;
    };
    if (!on_cpu_ || s_.outer != 1 || std::popcount(inner_) != 1 || s_.nests.size() < 2) return;
    meet("generated.beside", row);
    meet("generated.rows_beside", s_.rows / kChunksBeside);
    if (row < kBesideRow || rows < int64_t(2 * s_.nests.size()) ||
        !std::ranges::all_of(s_.nests, of_rows))
      return;
    int all = 0;
    for (const Nest& n : s_.nests) all += work(n);
    if (all < kWorkBeside) return;
    for (size_t id = 0; id < s_.values.size(); ++id)
      if (s_.values[id].buffered && !by_the_next(InstrId(id))) return;
    s_.beside = true, s_.chunk_rows = rows;
    s_.pieces = softmax_pieces(s_);
  }
  int work(const Nest& n) const {
    int work = 0;
    for (InstrId id : n.values)
      work += instr(id).kind == InstrKind::kPointwise ? op_info(instr(id).op).traits.cost : 1;
    return work;
  }
  // Keeps value `id` in the row of the last result that permits it, but not if those rows are
  // streamed and long (or nests run beside each other). What the first nest computes in pieces
  // stays in a buffer: it would be written to the result's row before elements are picked, and the
  // result could then not lie over the operand they are picked from.
  void keep_in_result(InstrId id) {
    const AccessOrder order(s_);
    if (s_.pieces.size > 0 && order.computed_in(id) == 0) return;
    for (size_t n = s_.nests.size(); n-- > 0;)
      for (int k : s_.nests[n].stores) {
        if (!order.may_wait_in(id, k)) continue;
        const bool long_row = s_.count(inner_) * bytes_of(instr(id).dtype) >= kLongRow;
        if (s_.streamed[size_t(k)] && (s_.beside || long_row)) return;
        at(id).kept_in = k, s_.streamed[size_t(k)] = false;
        return;
      }
  }
  // Chooses what is prefetched while nests compute. Nests beside each other prefetch all the time,
  // and so does a single nest that streams and runs functions on groups, since its steps are long.
  // Otherwise the nest that computes most, on a row that is in a cache by then, prefetches the next
  // row if rows are long. Only operands of which all of a row is read are prefetched.
  void look_ahead() {
    const bool alone =
        s_.nests.size() == 1 && std::ranges::count(s_.streamed, true) > 0 &&
        std::ranges::any_of(s_.nests[0].values, [&](InstrId id) {
          const Functor* functor = find_functor(instr(id).op);
          return functor && functor->in_groups && register_type(instr(id).dtype) == "float";
        });
    if (!on_cpu_ || s_.outer > 1 || (!alone && (s_.outer == 0 || s_.nests.size() < 2))) return;
    int most = 0, by = -1;
    for (size_t n = 1; n < s_.nests.size() && !s_.beside; ++n) {
      if ((s_.nests[n].loops & inner_) == inner_ && work(s_.nests[n]) > most)
        most = work(s_.nests[n]), by = int(n);
    }
    std::vector<int> streams;
    for (size_t k = 0; k < s_.body.operands.size(); ++k) {
      const Access& a = s_.body.operands[k];
      const int64_t row = row_bytes(a);
      if (moving_loops(a) != (outer_ | inner_) || a.strides.back() != 1) continue;
      if (alone || s_.beside) {
        const bool picked = first_reader(int(k)) < 0;
        if (!picked && s_.count(outer_) * row >= kFetched) streams.push_back(int(k));
      } else if (by >= 0 && row >= kLongRow && row <= kRowBuffers) {
        s_.ahead.push_back({int(k), by, a.strides[0], 2});
      }
    }
    for (int k : streams) {
      fetch_along(k, streams.size() == 1 ? kAhead : kEachAhead, 1);
      if (streams.size() == 1) fetch_along(k, kFarAhead, 2);
    }
  }
  int64_t row_bytes(const Access& a) const { return s_.count(inner_) * int64_t(size_of(a.dtype)); }
  void fetch_along(int operand, int64_t ahead, int level) {
    const Access& a = s_.body.operands[size_t(operand)];
    const int64_t size = int64_t(size_of(a.dtype)), row = row_bytes(a);
    const int reader = first_reader(operand);
    const bool dense = s_.outer == 0 || a.strides[0] * size == row;
    const int64_t elements =
        dense ? off_pages(ahead, row, reader) / size : (ahead + row - 1) / row * a.strides[0];
    s_.ahead.push_back({operand, reader, elements, level});
  }
  // Returns `ahead` bytes, or somewhat more, so that the distance is no whole number of pages from
  // where nest `reader` or a later one stores a result with rows of `row` bytes.
  int64_t off_pages(int64_t ahead, int64_t row, int reader) const {
    constexpr int64_t kPage = 4 << 10, kNear = 512;
    const auto meets_stores = [&](int64_t bytes) {
      for (int n = reader; n < int(s_.nests.size()); ++n)
        if (!s_.nests[size_t(n)].stores.empty() &&
            (bytes + (n - reader) * row + kNear) % kPage < 2 * kNear)
          return true;
      return false;
    };
    for (int64_t bytes = ahead; bytes < ahead + kPage; bytes += 2 * kNear)
      if (!meets_stores(bytes)) return bytes;
    return ahead;
  }
  int first_reader(int operand) const {
    for (size_t n = 0; n < s_.nests.size(); ++n)
      for (InstrId id : s_.nests[n].values)
        if (instr(id).kind == InstrKind::kLoad && instr(id).operand == operand) return int(n);
    return -1;
  }
  void visit(int n, InstrId id) {
    Placed& p = at(id);
    if (p.place != Place::kElement || seen_[size_t(id)]) return;
    seen_[size_t(id)] = true;
    if (p.reduce != ReduceAs::kNone) return s_.nests[size_t(n)].values.push_back(id);
    if (AccessOrder(s_).computed_in(id) >= 0 && (p.buffered || keep(id))) {
      p.buffered = true;
      return s_.nests[size_t(n)].reread.push_back(id);
    }
    for (InstrId x : instr(id).in) visit(n, x);
    s_.nests[size_t(n)].values.push_back(id);
  }
  bool keep(InstrId id) {
    if (cost(id) < kWorthKeeping) return false;
    int64_t bytes = s_.count(instr(id).loops & inner_) * bytes_of(instr(id).dtype);
    if (buffered_bytes_ + bytes > kRowBuffers) return false;
    buffered_bytes_ += bytes;
    return true;
  }
  // A rough number of vector instructions that computing a value again takes.
  int cost(InstrId id) const {
    const Instr& i = instr(id);
    if (s_.at(id).place != Place::kElement || s_.at(id).reduce != ReduceAs::kNone ||
        s_.at(id).buffered)
      return 0;
    int total = 1 + (i.dtype == kBF16 ? 3 : i.dtype == kF16 || is_storage_only(i.dtype) ? 6 : 0);
    if (i.kind == InstrKind::kLoad && s_.body.operands[size_t(i.operand)].strides.back() > 1)
      total += 4;
    if (i.kind == InstrKind::kLoad && size_of(i.dtype) == 1) total += 3;  // as wide as floats
    if (i.kind == InstrKind::kPointwise) total += op_info(i.op).traits.cost - 1;
    for (InstrId x : i.in) total = std::min(total + cost(x), 1000);
    return total;
  }

  // ---- rows and chunks ----

  bool cut_rows() {
    const int64_t row = s_.count(inner_);
    bool arrays = false, sums = false, plain = s_.row_stores.empty() && s_.row_reductions.empty();
    const LoopMask vector = s_.loops() ? LoopMask(1) << (s_.loops() - 1) : 0;
    for (size_t k = 0; k < s_.values.size(); ++k) {
      if (!s_.values[k].used || s_.values[k].reduce == ReduceAs::kNone) continue;
      if (s_.values[k].reduce == ReduceAs::kChunk)
        (instr(InstrId(k)).loops ? arrays : sums) = true;
      else
        plain = false;
    }
    for (const Nest& n : s_.nests) plain = plain && n.loops & vector;
    s_.rows = s_.count(outer_);
    int64_t work = row;
    if (vector && sums) meet("generated.sum_block", s_.body.extents.back());
    if (arrays) meet("generated.sum_rows", s_.rows);
    if (plain && may_block_ && !arrays && vector && s_.body.extents.back() > kSumBlock) {
      s_.block = kSumBlock;
      s_.rows *= (s_.body.extents.back() + kSumBlock - 1) / kSumBlock;
      work = row / s_.body.extents.back() * kSumBlock;
    }
    if (s_.rows == 1 && !plain) meet("generated.one_row", row);
    if (s_.rows == 1 && !plain && row > kSerial) return false;
    s_.chunk_rows = std::max<int64_t>(1, kChunk / work);
    if (arrays && s_.chunk_rows <= kSumRows)
      meet("generated.arrays", s_.rows / kChunksOfArrays, kSumRows);
    if (arrays)
      s_.chunk_rows = std::max({s_.chunk_rows, kSumRows, s_.rows / kChunksOfArrays});
    else if (sums)
      s_.chunk_rows = std::max(s_.chunk_rows, s_.rows / kChunksOfScalars);
    meet("generated.chunk", s_.rows, s_.chunk_rows);
    s_.chunk_rows = std::min(s_.chunk_rows, s_.rows);
    return true;
  }

  Schedule s_;
  const bool may_block_, on_cpu_;
  const int64_t streamed_from_;
  LoopMask outer_ = 0, inner_ = 0;
  std::vector<bool> seen_;  // by instruction: in the nest that is being filled
  int64_t buffered_bytes_ = 0;
  int64_t totals_ = 0;  // words of four bytes, on the stack, that running totals take
};

std::optional<Schedule> schedule_with(const Body& body, LoopMask inner, int vector, bool may_block,
                                      Target target) {
  int outer = 0;
  Body b = in_order(body, inner, vector, outer);
  return Scheduler(b, outer, may_block, target).run();
}

}  // namespace

int64_t Schedule::count(LoopMask mask) const { return count_loops(body, mask); }
bool Schedule::widened(const Nest& n, InstrId id) const {
  const Instr& i = instr(id);
  return i.kind == InstrKind::kLoad && i.dtype == kBool &&
         body.operands[size_t(i.operand)].strides[size_t(31 - __builtin_clz(n.loops))] == 1;
}
bool Schedule::touches_bytes(const Nest& n) const {
  return std::ranges::any_of(n.values,
                             [&](InstrId id) {
                               return instr(id).kind == InstrKind::kLoad &&
                                      size_of(instr(id).dtype) == 1 && !widened(n, id);
                             }) ||
         std::ranges::any_of(n.stores,
                             [&](int k) { return size_of(body.stores[size_t(k)].to.dtype) == 1; });
}

int64_t scratch_offset(const Schedule& s, InstrId reduction) {
  int64_t at = 0;
  for (size_t k = 0; k < size_t(reduction); ++k)
    if (s.values[k].used && s.values[k].reduce == ReduceAs::kChunk)
      at += (s.count(s.body.instrs[k].loops) * 8 + 63) / 64 * 64;
  return at;
}
int64_t chunk_scratch_bytes(const Schedule& s) {
  return scratch_offset(s, InstrId(s.values.size()));
}
int64_t scratch_bytes(const Schedule& s) { return chunk_scratch_bytes(s) * s.chunks(); }

std::optional<Schedule> make_schedule(const Body& original, Target target) {
  for (const Instr& i : original.instrs)  // u8 could only be computed through a cast to bool
    if (i.kind == InstrKind::kReduce && i.dtype == kU8 && i.reduce >= ReduceKind::kAny)
      return std::nullopt;
  Body body = without_single_loops(original);
  if (body.extents.empty()) return Scheduler(body, 0, false, target).run();
  int vector = vector_loop(body);
  LoopMask inner = inner_loops(body, vector), all = (LoopMask(1) << body.extents.size()) - 1;
  for (bool may_block : {true, false})
    if (auto s = schedule_with(body, inner, vector, may_block, target)) return s;
  if (count_loops(body, all) > kSerial) return std::nullopt;
  return schedule_with(body, all, vector, false, target);
}

bool schedulable(const Body& body) { return make_schedule(body).has_value(); }

}  // namespace tessera::compiler
