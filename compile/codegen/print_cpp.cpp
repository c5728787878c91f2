// Prints the C++ text of a scheduled body: one function that computes a chunk of rows, and, where
// sums run over rows, one that combines what the chunks left. Names: v3 a value, s3 and a3 the
// running total of reduction 3 in a row (one number, or one for each element it keeps), c3 the same
// of a chunk, l3 its lanes, b3 the buffer of a row's values; x0, y0 operands and results, r0, w0
// their parts that a row touches, o0 a result on its way past the caches, apart0 whether it lies
// over no operand, h0 what is fetched of an operand's next row; i0 indices.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "compile/codegen/functors.h"
#include "compile/codegen/kernel_text.h"
#include "core/base/error.h"

namespace tessera::compiler {
namespace {

class Printer : KernelText {
 public:
  Printer(const Schedule& s, std::string_view name) : KernelText(s), name_(name) {}

  std::string run() {
    find_positions();
    print_run();
    if (scratch_bytes(s_) > 0) print_finish();
    return std::move(text_);
  }

 private:
  // ---- indices as positions ----

  struct Comparison {
    int loop;
    InstrId position;
  };
  // What compares positions with the index of loop `v`.
  bool compares(const Nest& n, int v) const {
    return std::ranges::any_of(n.values, [&](InstrId id) {
      auto c = as_position_.find(id);
      return c != as_position_.end() && c->second.loop == v;
    });
  }

  // eq(index, v) with v fixed in the row: v becomes an int, -1 when out of range, so that the
  // comparison is as wide as the floats beside it.
  void find_positions() {
    for (size_t k = 0; k < b_.instrs.size(); ++k) {
      const Instr& i = b_.instrs[k];
      if (i.kind != InstrKind::kPointwise || i.op != "eq" || !s_.values[k].used) continue;
      for (int side : {0, 1}) {
        InstrId index = i.in[size_t(side)], to = i.in[size_t(1 - side)];
        const Instr& x = instr(index);
        if (x.kind != InstrKind::kIndex || at(to).place == Place::kElement ||
            at(to).place == Place::kLate || at(index).place != Place::kElement)
          continue;
        int64_t extent = b_.extents[size_t(x.loop)];
        auto known = positions_.find(to);
        if (extent > INT32_MAX || (known != positions_.end() && known->second != extent)) continue;
        positions_[to] = extent;
        as_position_[InstrId(k)] = {x.loop, to};
        break;
      }
    }
  }

  // ---- softmax ----

  // exp(x - amax(x)) needs no care for large results.
  bool is_exp_below_max(InstrId id) const {
    const Instr& i = instr(id);
    if (i.kind != InstrKind::kPointwise || i.op != "exp" || i.dtype != kF32) return false;
    const Instr& d = instr(i.in[0]);
    if (d.kind != InstrKind::kPointwise || d.op != "sub") return false;
    const Instr& m = instr(d.in[1]);
    return m.kind == InstrKind::kReduce && m.reduce == ReduceKind::kMax && m.in[0] == d.in[0];
  }
  // A row's sum of those, which is at least 1: dividing by it is multiplying by its reciprocal.
  bool is_softmax_sum(InstrId id) const {
    const Instr& i = instr(id);
    return i.kind == InstrKind::kReduce && i.reduce == ReduceKind::kSum &&
           at(id).place == Place::kRow && is_exp_below_max(i.in[0]);
  }

  // ---- values ----

  // In lanes the step is subtracted from the position: numbers of lanes are constants of a vector.
  std::string position_text(const Comparison& c) const {
    if (lane_loop_ != c.loop) return fmt::format("int(i{}) == t{}", c.loop, c.position);
    return fmt::format("int(l) == t{} - int(i{} - l)", c.position, c.loop);
  }

  std::string value_text(InstrId id) const {
    const Instr& i = instr(id);
    switch (i.kind) {
      case InstrKind::kLoad: return loaded(i.dtype, operand(i.operand));
      case InstrKind::kIndex: return fmt::format("i{}", i.loop);
      case InstrKind::kReduce:
        return finished(i, at(id).place == Place::kElement
                               ? fmt::format("a{}[{}]", id, dense(kept(i)))
                               : fmt::format("s{}", id));
      default: break;
    }
    if (is_exp_below_max(id)) return fmt::format("exp_to_88(v{})", i.in[0]);
    if (i.kind == InstrKind::kPointwise && i.op == "div" && is_softmax_sum(i.in[1]))
      return fmt::format("v{} * q{}", i.in[0], i.in[1]);
    auto position = as_position_.find(id);
    return position != as_position_.end() ? position_text(position->second) : expression(b_, i);
  }
  void print_value(InstrId id) {
    line("const {} v{} = {};", register_type(instr(id).dtype), id, value_text(id));
    if (is_softmax_sum(id)) line("const float q{} = 1.0f / v{};", id, id);
    auto position = positions_.find(id);
    if (position != positions_.end())
      line("const int t{} = position(v{}, {});", id, id, position->second);
  }
  // Values of rows that are ready after the nests of stages below `stage`.
  void print_row_values(Place place, int stage) {
    for (size_t k = 0; k < b_.instrs.size(); ++k)
      if (s_.values[k].used && s_.values[k].place == place && s_.values[k].stage == stage)
        print_value(InstrId(k));
  }

  // ---- the function that computes a chunk ----

  // Loops that read bools as such are not vectorised by GCC 12.
  static std::string read_type(DType t) { return t == kBool ? "unsigned char" : memory_type(t); }
  void print_pointers() {
    for (size_t k = 0; k < b_.operands.size(); ++k) {
      std::string type = read_type(b_.operands[k].dtype);
      line("const {}* x{} = reinterpret_cast<const {}*>(p[{}]);", type, k, type, k);
    }
    for (size_t k = 0; k < b_.stores.size(); ++k) {
      std::string type = memory_type(b_.stores[k].to.dtype);
      line("{}* y{} = reinterpret_cast<{}*>(p[{}]);", type, k, type, b_.operands.size() + k);
    }
  }

  // A result over an operand is not streamed: its lines have been read.
  void print_apart() {
    for (size_t k = 0; k < b_.stores.size(); ++k) {
      if (!s_.streamed[k]) continue;
      std::string text;
      for (size_t x = 0; x < b_.operands.size(); ++x)
        if (b_.operands[x].dtype == b_.stores[k].to.dtype)
          text += fmt::format("{}p[{}] != p[{}]", text.empty() ? "" : " && ",
                              b_.operands.size() + k, x);
      line("const bool apart{} = {};", k, text.empty() ? "true" : text);
    }
  }
  void print_run() {
    open("extern \"C\" void {}_run(char* const* p, long chunk, char* scratch)", name_);
    print_pointers();
    print_apart();
    print_row_values(Place::kHead, 0);
    for (size_t k = 0; k < b_.instrs.size(); ++k)
      if (s_.values[k].used && s_.values[k].reduce == ReduceAs::kChunk)
        print_chunk_total(InstrId(k));
    const bool one = s_.rows == 1;
    if (one) {
      open("");
    } else {
      line("const long first = chunk * {}, end = first + {} < {} ? first + {} : {};", s_.chunk_rows,
           s_.chunk_rows, s_.rows, s_.chunk_rows, s_.rows);
      if (s_.beside) print_first_scan();
      open("for (long row = first; row < end; ++row)");
    }
    print_row();
    close();
    print_leave_totals();
    if (std::ranges::count(s_.streamed, true)) line("finish_streams();");
    close();
    text_ += '\n';
  }

  void print_indices() {
    int64_t inside = 1;
    if (s_.block > 0) {
      const int v = s_.loops() - 1;
      int64_t extent = b_.extents[size_t(v)], pieces = (extent + s_.block - 1) / s_.block;
      line("const long begin{} = row % {} * {}, end{} = begin{} + {} < {} ? begin{} + {} : {};", v,
           pieces, s_.block, v, v, s_.block, extent, v, s_.block, extent);
      inside = pieces;
    }
    for (int l = s_.outer - 1; l >= 0; --l) {
      std::string text = "row";
      if (inside > 1) text += fmt::format(" / {}", inside);
      if (l > 0) text += fmt::format(" % {}", b_.extents[size_t(l)]);
      line("const long i{} = {};", l, text);
      inside *= b_.extents[size_t(l)];
    }
  }
  void print_row() {
    print_indices();
    print_operand_rows();
    for (size_t k = 0; k < b_.stores.size(); ++k)
      if (at(b_.stores[k].value).place != Place::kLate)
        print_row_pointer(b_.stores[k].to, "", "w", "y", k);
    for (size_t k = 0; k < b_.instrs.size(); ++k)
      if (s_.values[k].buffered && s_.values[k].kept_in < 0)
        line("alignas(64) {} b{}[{}];", buffer_type(b_.instrs[k].dtype), k,
             s_.count(b_.instrs[k].loops & inner()));
    int stage = 0;
    print_row_values(Place::kRow, 0);
    for (size_t k = 0; k < b_.instrs.size(); ++k)
      if (s_.values[k].used && s_.values[k].reduce == ReduceAs::kPick) print_pick(InstrId(k));
    for (const Nest& n : s_.nests) {
      for (; stage < n.stage; ++stage) print_row_values(Place::kRow, stage + 1);
      if (s_.beside && &n == &s_.nests[0])
        print_scanned_total();
      else
        print_nest(n);
    }
    for (int last = last_stage(); stage < last; ++stage) print_row_values(Place::kRow, stage + 1);
    for (int k : s_.row_stores) {
      const Store& s = b_.stores[size_t(k)];
      line("{} = {};", result(k), stored(s.to.dtype, fmt::format("v{}", s.value)));
    }
    for (InstrId id : s_.row_reductions)
      line("{};", join(instr(id), fmt::format("c{}", id), fed(instr(id))));
    print_move_on();
  }
  void print_operand_rows() {
    for (size_t k = 0; k < b_.operands.size(); ++k)
      print_row_pointer(b_.operands[k], "const ", "r", "x", k);
  }
  void print_pick(InstrId id) {
    const Instr &where = instr(instr(id).in[0]), &x = instr(where.in[1]);
    const Comparison& c = as_position_.at(where.in[0]);
    line("double s{} = 0.0;", id);
    line("if (const long i{} = t{}; i{} >= 0) s{} += {};", c.loop, c.position, c.loop, id,
         loaded(x.dtype, operand(x.operand)));
  }
  int last_stage() const {
    int last = 0;
    for (const Placed& p : s_.values)
      if (p.used) last = std::max(last, p.stage);
    return last;
  }
  void print_row_pointer(const Access& a, const char* constness, const char* row, const char* base,
                         size_t k) {
    if (!(moving_loops(a) & outer()) || !(moving_loops(a) & inner())) return;
    const std::string type = *constness ? read_type(a.dtype) : memory_type(a.dtype);
    line("{}{}* {}{} = {}{} + {};", constness, type, row, k, base, k, offset(a, outer()));
  }

  // ---- nests ----

  void print_nest(const Nest& n) {
    const int v = last_of(n.loops);
    std::vector<InstrId> lanes;
    for (InstrId id : n.reductions) {
      const Instr& i = instr(id);
      if (at(id).reduce == ReduceAs::kRow) print_row_total(id, n);
      if (reduces_vector(i, n)) lanes.push_back(id);
    }
    int opened = 0;
    for (int l = s_.outer; l < v; ++l) {
      if (!(n.loops >> l & 1)) continue;
      open("for (long i{} = 0; i{} < {}; ++i{})", l, l, b_.extents[size_t(l)], l);
      ++opened;
      print_level(n, l);
    }
    const bool plain = lanes.empty() && !streams(n) && !compares(n, v) && !looks_ahead(n);
    plain ? print_plain(n, v) : print_in_lanes(n, v, lanes);
    while (opened-- > 0) close();
  }
  void print_row_total(InstrId id, const Nest& n) {
    const Instr& i = instr(id);
    if (kept(i) == 0)
      return line("{} s{} = {}::start<{}>();", total_type(i), id, reduction_type(i.reduce),
                  total_type(i));
    line("alignas(64) {} a{}[{}];", array_type(i, n), id, s_.count(kept(i)));
    line("start<{}>(a{}, {});", reduction_type(i.reduce), id, s_.count(kept(i)));
  }
  static std::string buffer_type(DType t) { return t == kBool ? read_type(t) : register_type(t); }
  std::string buffer(InstrId id) const {
    return at(id).kept_in >= 0 ? result(at(id).kept_in)
                               : fmt::format("b{}[{}]", id, dense(instr(id).loops & inner()));
  }
  // Values whose last loop is `l`, and what is done with them.
  void print_level(const Nest& n, int l) {
    for (InstrId id : n.reread)
      if (last_of(instr(id).loops) == l)
        line("const {} v{} = {};", register_type(instr(id).dtype), id,
             instr(id).dtype == kBool ? loaded(kBool, buffer(id)) : buffer(id));
    for (InstrId id : n.values) {
      if (last_of(instr(id).loops) != l) continue;
      print_value(id);
      if (at(id).buffered) line("{} = v{};", buffer(id), id);
    }
  }
  void print_element(const Nest& n, int v) {
    print_level(n, v);
    for (InstrId id : n.reductions) {
      const Instr& i = instr(id);
      line("{};", reduces_vector(i, n) ? fmt::format("l{}.term[l] = {}", id, fed(i))
                                       : join(i, total(id), fed(i)));
    }
    for (int k : n.stores) {
      const Store& s = b_.stores[size_t(k)];
      line("{} = {};", s_.streamed[size_t(k)] ? fmt::format("o{}.term[l]", k) : result(k),
           stored(s.to.dtype, fmt::format("v{}", s.value)));
    }
  }
  // The running total that reduction `id` adds to inside its nest.
  std::string total(InstrId id) const {
    const Instr& i = instr(id);
    const char* prefix = at(id).reduce == ReduceAs::kChunk ? "c" : kept(i) ? "a" : "s";
    return kept(i) ? fmt::format("{}{}[{}]", prefix, id, dense(kept(i)))
                   : fmt::format("{}{}", prefix, id);
  }
  std::string begin_of(int v) const {
    return blocked(v) ? fmt::format("begin{}", v) : std::string("0");
  }
  std::string end_of(int v) const {
    return blocked(v) ? fmt::format("end{}", v) : fmt::format("{}", b_.extents[size_t(v)]);
  }
  bool blocked(int v) const { return s_.block > 0 && v == s_.loops() - 1; }

  void print_plain(const Nest& n, int v) {
    text_ += "#pragma GCC ivdep\n";
    open("for (long i{} = {}; i{} < {}; ++i{})", v, begin_of(v), v, end_of(v), v);
    print_element(n, v);
    close();
  }
  // ---- the first nest of the next row, beside the second of this one ----

  InstrId scanned() const { return s_.nests[0].reductions[0]; }
  void print_lanes(InstrId id, int64_t count) {
    line("Lanes<{}, {}, {}> l{};", reduction_type(instr(id).reduce), lane_type(instr(id)), count,
         id);
  }
  // `scan(row, lanes)` is what the first nest does with an element of a row; n3 the total of
  // reduction 3 of the row that comes.
  void print_first_scan() {
    const Nest& n = s_.nests[0];
    const InstrId id = scanned();
    const int v = last_of(n.loops);
    open("auto scan = [&](long row, auto& l{}) __attribute__((always_inline))", id);
    print_indices();
    print_operand_rows();
    print_row_values(Place::kRow, 0);
    open("return [=, &l{}](long i{}, long l) __attribute__((always_inline))", id, v);
    lane_loop_ = v;
    print_element(n, v);
    lane_loop_ = -1;
    close("};");
    close("};");
    line("{} n{} = {}::start<{}>();", total_type(instr(id)), id, reduction_type(instr(id).reduce),
         total_type(instr(id)));
    open("");
    print_lanes(id, lanes_of(n));
    line("in_lanes<{}>(0, {}, scan(first, l{}), l{});", lanes_of(n), b_.extents[size_t(v)], id, id);
    line("{};", join(instr(id), fmt::format("n{}", id), fmt::format("l{}.folded()", id)));
    close();
  }
  void print_scanned_total() {
    const Instr& i = instr(scanned());
    line("const {} s{} = n{};", total_type(i), scanned(), scanned());
    line("n{} = {}::start<{}>();", scanned(), reduction_type(i.reduce), total_type(i));
  }

  bool looks_ahead(const Nest& n) const {
    return !s_.ahead.empty() && &n == &s_.nests[size_t(s_.ahead_in)] &&
           n.loops >> (s_.loops() - 1) & 1;
  }
  bool streams(const Nest& n) const {
    return std::ranges::any_of(n.stores, [&](int k) { return s_.streamed[size_t(k)]; });
  }
  int64_t lanes_of(const Nest& n) const {
    const int64_t extent = b_.extents[size_t(last_of(n.loops))];
    int64_t count = 1, most = s_.touches_bytes(n) ? kMaxLanesOfBytes : kMaxLanes;
    while (count < most && count < extent) count *= 2;
    return count;
  }
  void print_in_lanes(const Nest& n, int v, const std::vector<InstrId>& lanes) {
    const int64_t extent = b_.extents[size_t(v)], count = lanes_of(n);
    std::string begin = begin_of(v), end = end_of(v);
    const bool cut = !lanes.empty() && !blocked(v) && extent > kSumBlock;
    if (cut) {
      open("for (long block = 0; block < {}; block += {})", extent, kSumBlock);
      begin = "block";
      end =
          fmt::format("(block + {} < {} ? block + {} : {})", kSumBlock, extent, kSumBlock, extent);
    }
    std::string totals;
    for (InstrId id : lanes) {
      print_lanes(id, count);
      totals += fmt::format(", l{}", id);
    }
    const bool beside = s_.beside && &n == &s_.nests[1];
    if (beside) {
      print_lanes(scanned(), count);
      line("auto of_next = scan(row + 1 < end ? row + 1 : row, l{});", scanned());
      line("Beside<{}, decltype(of_next), decltype(l{})> beside{{of_next, l{}}};", count, scanned(),
           scanned());
      totals += ", beside";
    }
    for (int k : n.stores) {
      if (!s_.streamed[size_t(k)]) continue;
      const Access& to = b_.stores[size_t(k)].to;
      line("Streamed<{}, {}> o{}{{&{}, apart{}}};", memory_type(to.dtype), count, k,
           element(to, "y", "w", k, ~(LoopMask(1) << v)), k);
      totals += fmt::format(", o{}", k);
    }
    for (int k : looks_ahead(n) ? s_.ahead : std::vector<int>{}) {
      const Access& a = b_.operands[size_t(k)];
      line("Ahead<{}, {}> h{}{{&{} + {}}};", read_type(a.dtype), count, k,
           element(a, "x", "r", k, ~(LoopMask(1) << v)), a.strides[0] * s_.rows_ahead);
      totals += fmt::format(", h{}", k);
    }
    open("{}<{}>({}, {}, [&](long i{}, long l) __attribute__((always_inline))",
         lanes.empty() && streams(n) ? "in_streams" : "in_lanes", count, begin, end, v);
    lane_loop_ = v;
    print_element(n, v);
    lane_loop_ = -1;
    close(("}" + totals + ");").c_str());
    for (InstrId id : lanes)
      line("{};", join(instr(id), total(id), fmt::format("l{}.folded()", id)));
    if (beside)
      line("{};", join(instr(scanned()), fmt::format("n{}", scanned()),
                       fmt::format("l{}.folded()", scanned())));
    if (cut) close();
  }

  // ---- totals of chunks ----

  // Single-precision sums over rows, which are moved on to double every kSumRows rows.
  bool moves_on(InstrId id) const {
    const Instr& i = instr(id);
    return at(id).used && at(id).reduce == ReduceAs::kChunk && kept(i) && in_double(i) &&
           array_type(i, *nest_of(id)) != "double";
  }
  bool in_scratch(InstrId id) const { return kept(instr(id)) && !moves_on(id); }
  std::string scratch_of(InstrId id) const {
    return fmt::format("reinterpret_cast<{}*>(scratch + chunk * {} + {})", total_type(instr(id)),
                       chunk_scratch_bytes(s_), scratch_offset(s_, id));
  }
  void print_chunk_total(InstrId id) {
    const Instr& i = instr(id);
    const int64_t count = s_.count(kept(i));
    std::string kind = reduction_type(i.reduce);
    if (!kept(i)) {
      line("{} c{} = {}::start<{}>();", total_type(i), id, kind, total_type(i));
    } else if (in_scratch(id)) {
      line("{}* c{} = {};", total_type(i), id, scratch_of(id));
      line("start<{}>(c{}, {});", kind, id, count);
    } else {
      line("alignas(64) {} c{}[{}];", lane_type(i), id, count);
      line("double* d{} = {};", id, scratch_of(id));
      line("start<{}>(c{}, {});", kind, id, count);
      line("start<{}>(d{}, {});", kind, id, count);
    }
  }
  void print_move_on() {
    if (s_.chunk_rows <= kSumRows) return;
    bool any = false;
    for (size_t k = 0; k < b_.instrs.size(); ++k) {
      if (!moves_on(InstrId(k))) continue;
      if (!std::exchange(any, true)) open("if ((row - first) % {} == {})", kSumRows, kSumRows - 1);
      line("move_on(d{}, c{}, {});", k, k, s_.count(kept(b_.instrs[k])));
    }
    if (any) close();
  }
  void print_leave_totals() {
    for (size_t k = 0; k < b_.instrs.size(); ++k) {
      const InstrId id = InstrId(k);
      if (!at(id).used || at(id).reduce != ReduceAs::kChunk || in_scratch(id)) continue;
      if (moves_on(id))
        line("move_on(d{}, c{}, {});", id, id, s_.count(kept(instr(id))));
      else
        line("*{} = c{};", scratch_of(id), id);
    }
  }

  // ---- the function that combines chunks ----

  void print_finish() {
    open("extern \"C\" void {}_finish(char* const* p, char* scratch)", name_);
    print_pointers();
    for (size_t k = 0; k < b_.instrs.size(); ++k) {
      if (!s_.values[k].used || s_.values[k].reduce != ReduceAs::kChunk) continue;
      const Instr& i = b_.instrs[k];
      line("{}* c{} = reinterpret_cast<{}*>(scratch + {});", total_type(i), k, total_type(i),
           scratch_offset(s_, InstrId(k)));
      line("combine<{}>(c{}, {}, {}, {});", reduction_type(i.reduce), k, chunk_scratch_bytes(s_),
           s_.chunks(), s_.count(i.loops));
    }
    for (int k : s_.late_stores) print_late_store(k);
    close();
    text_ += '\n';
  }
  void late_closure(InstrId id, std::vector<InstrId>& found) const {
    if (std::count(found.begin(), found.end(), id)) return;
    if (at(id).reduce == ReduceAs::kNone)
      for (InstrId x : instr(id).in) late_closure(x, found);
    found.push_back(id);
  }
  void print_late_store(int k) {
    const Store& s = b_.stores[size_t(k)];
    std::vector<InstrId> values;
    late_closure(s.value, values);
    int opened = 1;
    open("");
    for (int l = 0; l < s_.loops(); ++l)
      if (instr(s.value).loops >> l & 1) {
        open("for (long i{} = 0; i{} < {}; ++i{})", l, l, b_.extents[size_t(l)], l);
        ++opened;
      }
    for (InstrId id : values) {
      const Instr& i = instr(id);
      if (i.kind == InstrKind::kReduce)
        line("const {} v{} = {};", register_type(i.dtype), id,
             finished(i, fmt::format("c{}[{}]", id, dense(i.loops))));
      else
        print_value(id);
    }
    line("{} = {};", result(k), stored(s.to.dtype, fmt::format("v{}", s.value)));
    while (opened-- > 0) close();
  }

  const std::string name_;
  std::map<InstrId, int64_t> positions_;       // extent of the index they are compared with
  std::map<InstrId, Comparison> as_position_;  // comparisons of indices and positions
  int lane_loop_ = -1;                         // the loop whose lanes `l` counts
};

}  // namespace

std::string print_cpp(const Body& body, std::string_view name) {
  std::optional<Schedule> schedule = make_schedule(body);
  TESSERA_ASSERT(schedule, "print_cpp: {} cannot be scheduled:\n{}", name, to_string(body));
  return Printer(*schedule, name).run();
}

}  // namespace tessera::compiler
