// Prints the C++ text of a scheduled body: one function that computes a chunk of rows and, where
// sums run over rows, one that combines the results of the chunks. Names: v3 is a value, s3 and a3
// are the running total of reduction 3 in a row (one number, or one for each element it keeps), c3
// the same for a chunk, l3 its lanes, b3 the buffer of a row's values; x0 and y0 are operands and
// results, r0 and w0 the parts of them that a row touches, o0 a result that is stored past the
// caches, apart0 whether it overlaps no operand, h0_1 what is prefetched of operand 0 into L1; i0
// are indices.
#include <fmt/format.h>

#include <algorithm>

#include "compile/codegen/beside_text.h"
#include "compile/codegen/functors.h"
#include "core/base/error.h"

namespace tessera::compiler {
namespace {

class Printer : BesideText {
 public:
  using BesideText::kEnd;
  Printer(const Schedule& s, std::string_view name,
          std::vector<SizedText::Number>* numbers = nullptr)
      : BesideText(s, numbers), name_(name), sized_(numbers != nullptr) {}

  std::string run() {
    find_positions();
    print_run();
    if (scratch_bytes(s_) > 0) print_finish();
    return std::move(text_);
  }

 private:
  // ---- the function that computes a chunk ----

  void print_pointers() {
    if (sized_) text_ += SizedText::kTable;
    for (size_t k = 0; k < b_.operands.size(); ++k) {
      std::string type = read_type(b_.operands[k].dtype);
      line("const {}* x{} = reinterpret_cast<const {}*>(p[{}]);", type, k, type, k);
    }
    for (size_t k = 0; k < b_.stores.size(); ++k) {
      std::string type = memory_type(b_.stores[k].to.dtype);
      line("{}* y{} = reinterpret_cast<{}*>(p[{}]);", type, k, type, b_.operands.size() + k);
    }
  }

  // A result that lies over an operand is not streamed, because its lines have been read.
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
    if (s_.rows > 1)
      line("const long first = chunk * {}, end = first + {} < {} ? first + {} : {};",
           size(s_.chunk_rows), size(s_.chunk_rows), size(s_.rows), size(s_.chunk_rows),
           size(s_.rows));
    if (s_.beside) {
      print_nests_beside();
      open("for (long step = first; step < end + {}; ++step)", last_lag());
      print_rows_beside();
      print_move_on("step");
      print_next_step();
      close();
    } else {
      s_.rows == 1 ? open("") : open("for (long row = first; row < end; ++row)");
      print_row();
      close();
    }
    print_leave_totals();
    if (std::ranges::count(s_.streamed, true)) line("finish_streams();");
    close();
    text_ += '\n';
  }

  void print_row() {
    print_indices();
    print_operand_rows();
    for (size_t k = 0; k < b_.stores.size(); ++k)
      if (at(b_.stores[k].value).place != Place::kLate)
        print_row_pointer(b_.stores[k].to, "", "w", "y", k);
    print_buffers();
    int stage = 0;
    print_row_values(Place::kRow, 0);
    for (size_t k = 0; k < b_.instrs.size(); ++k)
      if (s_.values[k].used && s_.values[k].reduce == ReduceAs::kPick) print_pick(InstrId(k));
    for (const Nest& n : s_.nests) {
      for (; stage < n.stage; ++stage) print_row_values(Place::kRow, stage + 1);
      print_nest(n);
    }
    for (int last = last_stage(); stage < last; ++stage) print_row_values(Place::kRow, stage + 1);
    print_row_end();
    print_move_on("row");
  }
  int last_stage() const {
    int last = 0;
    for (const Placed& p : s_.values)
      if (p.used) last = std::max(last, p.stage);
    return last;
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
      open("for (long i{} = 0; i{} < {}; ++i{})", l, l, size(b_.extents[size_t(l)]), l);
      ++opened;
      print_level(n, l);
    }
    const bool plain =
        lanes.empty() && !streams(n) && !compares(n, v) && !looks_ahead(n) && !in_groups(n);
    plain ? print_plain(n, v) : print_in_lanes(n, v, lanes);
    while (opened-- > 0) close();
  }
  void print_row_total(InstrId id, const Nest& n) {
    const Instr& i = instr(id);
    if (kept(i) == 0)
      return line("{} s{} = {}::start<{}>();", total_type(i), id, reduction_type(i.reduce),
                  total_type(i));
    line("alignas(64) {} a{}[{}];", array_type(i, n), id, capacity(s_.count(kept(i))));
    line("start<{}>(a{}, {});", reduction_type(i.reduce), id, size(s_.count(kept(i))));
  }
  std::string begin_of(int v) const {
    return blocked(v) ? fmt::format("begin{}", v) : std::string("0");
  }
  std::string end_of(int v) {
    return blocked(v) ? fmt::format("end{}", v) : size(b_.extents[size_t(v)]);
  }
  bool blocked(int v) const { return s_.block > 0 && v == s_.loops() - 1; }

  void print_plain(const Nest& n, int v) {
    text_ += "#pragma GCC ivdep\n";
    open("for (long i{} = {}; i{} < {}; ++i{})", v, begin_of(v), v, end_of(v), v);
    print_element(n, v);
    close();
  }
  void print_in_lanes(const Nest& n, int v, const std::vector<InstrId>& lanes) {
    const int64_t extent = b_.extents[size_t(v)], count = step_of(n);
    std::string begin = begin_of(v), end = end_of(v);
    const bool cut = !lanes.empty() && !blocked(v) && extent > kSumBlock;
    if (cut) {
      open("for (long block = 0; block < {}; block += {})", size(extent), kSumBlock);
      begin = "block";
      end = fmt::format("(block + {} < {} ? block + {} : {})", kSumBlock, size(extent), kSumBlock,
                        size(extent));
    }
    std::string totals;
    for (InstrId id : lanes) {
      print_lanes(id, count);
      totals += fmt::format(", l{}", id);
    }
    for (int k : n.stores) {
      if (!s_.streamed[size_t(k)]) continue;
      const Access& to = b_.stores[size_t(k)].to;
      line("Streamed<{}, {}> o{}{{&{}, apart{}}};", memory_type(to.dtype), count, k,
           element(to, "y", "w", k, ~(LoopMask(1) << v)), k);
      totals += fmt::format(", o{}", k);
    }
    for (const Ahead& a : s_.ahead) {
      if (&n != &s_.nests[size_t(a.nest)]) continue;
      const Access& x = b_.operands[size_t(a.operand)];
      line("Ahead<{}, {}, {}> {}{{&{} + {}}};", read_type(x.dtype), count, a.level, name_of(a),
           element(x, "x", "r", a.operand, ~(LoopMask(1) << v)), size(a.elements));
      totals += ", " + name_of(a);
    }
    print_body(
        n, v, count,
        fmt::format("{}<{}>({}, {}, ", lanes.empty() && streams(n) ? "in_streams" : "in_lanes",
                    count, begin, end),
        "&", totals + ");");
    for (InstrId id : lanes)
      line("{};", join(instr(id), total(id), fmt::format("l{}.folded()", id)));
    if (cut) close();
  }
  // ---- totals of chunks ----

  // True for sums over rows in single precision. They are moved on to double every kSumRows rows.
  bool moves_on(InstrId id) const {
    const Instr& i = instr(id);
    return at(id).used && at(id).reduce == ReduceAs::kChunk && kept(i) && in_double(i) &&
           array_type(i, *nest_of(id)) != "double";
  }
  bool in_scratch(InstrId id) const { return kept(instr(id)) && !moves_on(id); }
  std::string scratch_of(InstrId id) {
    return fmt::format("reinterpret_cast<{}*>(scratch + chunk * {} + {})", total_type(instr(id)),
                       size(chunk_scratch_bytes(s_)), size(scratch_offset(s_, id)));
  }
  void print_chunk_total(InstrId id) {
    const Instr& i = instr(id);
    const int64_t count = s_.count(kept(i));
    std::string kind = reduction_type(i.reduce);
    if (!kept(i)) {
      line("{} c{} = {}::start<{}>();", total_type(i), id, kind, total_type(i));
    } else if (in_scratch(id)) {
      line("{}* c{} = {};", total_type(i), id, scratch_of(id));
      line("start<{}>(c{}, {});", kind, id, size(count));
    } else {
      line("alignas(64) {} c{}[{}];", lane_type(i), id, capacity(count));
      line("double* d{} = {};", id, scratch_of(id));
      line("start<{}>(c{}, {});", kind, id, size(count));
      line("start<{}>(d{}, {});", kind, id, size(count));
    }
  }
  void print_move_on(const char* row) {
    if (s_.chunk_rows <= kSumRows) return;
    bool any = false;
    for (size_t k = 0; k < b_.instrs.size(); ++k) {
      if (!moves_on(InstrId(k))) continue;
      if (!std::exchange(any, true))
        open("if (({} - first) % {} == {})", row, kSumRows, kSumRows - 1);
      line("move_on(d{}, c{}, {});", k, k, size(s_.count(kept(b_.instrs[k]))));
    }
    if (any) close();
  }
  void print_leave_totals() {
    for (size_t k = 0; k < b_.instrs.size(); ++k) {
      const InstrId id = InstrId(k);
      if (!at(id).used || at(id).reduce != ReduceAs::kChunk || in_scratch(id)) continue;
      if (moves_on(id))
        line("move_on(d{}, c{}, {});", id, id, size(s_.count(kept(instr(id)))));
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
           size(scratch_offset(s_, InstrId(k))));
      line("combine<{}>(c{}, {}, {}, {});", reduction_type(i.reduce), k,
           size(chunk_scratch_bytes(s_)), size(s_.chunks()), size(s_.count(i.loops)));
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
        open("for (long i{} = 0; i{} < {}; ++i{})", l, l, size(b_.extents[size_t(l)]), l);
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
  const bool sized_;
};

}  // namespace

std::string print_cpp(const Body& body, std::string_view name) {
  std::optional<Schedule> schedule = make_schedule(body);
  TESSERA_ASSERT(schedule, "print_cpp: {} cannot be scheduled:\n{}", name, to_string(body));
  return Printer(*schedule, name).run();
}

SizedText print_sized(const Body& body, std::string_view name) {
  std::optional<Schedule> schedule = make_schedule(body);
  TESSERA_ASSERT(schedule, "print_sized: {} cannot be scheduled:\n{}", name, to_string(body));
  std::vector<SizedText::Number> numbers;  // some belong to text that was dropped, or occur twice
  const std::string marked = Printer(*schedule, name, &numbers).run();
  SizedText result;
  for (size_t at = 0; at < marked.size(); ++at) {
    result.text += marked[at];
    if (marked[at] != SizedText::kNumber) continue;
    size_t index = 0;
    for (++at; marked[at] != Printer::kEnd; ++at) index = index * 10 + size_t(marked[at] - '0');
    result.numbers.push_back(numbers[index]);
  }
  return result;
}

}  // namespace tessera::compiler
