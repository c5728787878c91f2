// The text of nests that run beside each other: all in one loop of steps (prologue.h), each on a
// row of its own: nest k is k rows behind the first nest. The values of the row that a nest needs
// are computed from the totals of the nests before it; the totals travel with the row. Where a
// softmax works in pieces, the first two nests are on one row, the first a piece ahead. In that
// case m3 holds the maxima of the pieces and later the factors of their exponentials, and p6 holds
// the sums of the pieces.
#pragma once
#include <set>

#include "compile/codegen/body_text.h"

namespace tessera::compiler {

class BesideText : protected BodyText {
 protected:
  using BodyText::BodyText;

  // Prints what comes before the loop over rows: nest2(row, of, ..) is what nest 2 does with an
  // element of row `row`, whose totals so far are `of`.
  void print_nests_beside() {
    print_buffers();
    open("struct Totals");
    for (InstrId id : row_totals())
      line("{} s{} = {}::start<{}>();", total_type(instr(id)), id, reduction_type(instr(id).reduce),
           total_type(instr(id)));
    if (in_pieces()) {
      line("alignas(64) float m{}[{}];", s_.pieces.max, capacity(pieces()));
      line("alignas(64) double p{}[{}];", s_.pieces.sum, capacity(pieces()));
      line("float below = 0.0f, scale = 0.0f;");
    }
    close("};");
    for (int k = 0; k <= last_nest(); ++k) print_nest_beside(k);
    for (int k = 1; k <= lag(last_nest()); ++k) line("Totals of{};", k);
    if (in_pieces()) print_first_piece();
  }
  // Prints a step of the loop over rows: row2 is the row that nest 2 works on, on2 says whether
  // there is one, of2 are the row's totals.
  void print_rows_beside() {
    line("Totals of0;");
    for (int k = 0; k <= last_nest(); ++k) {
      line("const bool on{} = step >= first + {} && step < end + {};", k, lag(k), lag(k));
      line("const long row{} = on{} ? step - {} : first;", k, k, lag(k));
    }
    print_picks_beside();
    in_pieces() ? print_strands_in_pieces() : print_strands();
    open("if (on{})", last_nest());
    line("const long row = row{};", last_nest());
    line("const Totals& of = of{};", lag(last_nest()));
    print_end_beside();
    close();
  }
  void print_next_step() {
    for (int k = lag(last_nest()); k > 0; --k) line("of{} = of{};", k, k - 1);
  }
  // The number of rows that the last nest is behind the first.
  int last_lag() const { return lag(last_nest()); }

 private:
  int last_nest() const { return int(s_.nests.size()) - 1; }
  bool in_pieces() const { return s_.pieces.size > 0; }
  int64_t pieces() const { return (b_.extents.back() + s_.pieces.size - 1) / s_.pieces.size; }
  int lag(int nest) const { return in_pieces() && nest > 0 ? nest - 1 : nest; }

  std::vector<InstrId> row_totals() const {
    std::vector<InstrId> list;
    for (size_t k = 0; k < b_.instrs.size(); ++k) {
      const ReduceAs as = s_.values[k].reduce;
      if (s_.values[k].used && (as == ReduceAs::kRow || as == ReduceAs::kPick))
        list.push_back(InstrId(k));
    }
    return list;
  }
  // Collects the values of the row that `id` is computed from, and `id` itself.
  void need(InstrId id, std::set<InstrId>& found) const {
    if (at(id).place != Place::kRow || !found.insert(id).second) return;
    if (at(id).reduce == ReduceAs::kNone)
      for (InstrId x : instr(id).in) need(x, found);
  }
  void print_needed(const std::set<InstrId>& values) {
    for (InstrId id : values) {
      if (at(id).reduce != ReduceAs::kNone)
        line("const {} s{} = of.{};", total_type(instr(id)), id,
             of_piece_ && id == s_.pieces.max ? "below" : fmt::format("s{}", id));
      print_value(id);
    }
  }
  // Picks are read before a later nest may write over the operand.
  void print_picks_beside() {
    for (InstrId id : row_totals()) {
      if (at(id).reduce != ReduceAs::kPick) continue;
      std::set<InstrId> needed;
      need(as_position_.at(instr(instr(id).in[0]).in[0]).position, needed);
      open("");
      line("const long row = row0;");
      print_indices();
      print_operand_rows();
      print_needed(needed);
      print_pick(id);
      line("of0.s{} = s{};", id, id);
      close();
    }
  }
  void print_end_beside() {
    std::set<InstrId> needed;
    for (int k : s_.row_stores) need(b_.stores[size_t(k)].value, needed);
    for (InstrId id : s_.row_reductions) need(instr(id).in[0], needed);
    print_indices();
    print_needed(needed);
    print_row_end();
  }

  std::vector<std::string> names_of_lanes(int k) const {
    const Nest& n = s_.nests[size_t(k)];
    std::vector<std::string> names;
    for (InstrId id : lanes_in(n)) names.push_back(fmt::format("l{}", id));
    for (int store : n.stores)
      if (s_.streamed[size_t(store)]) names.push_back(fmt::format("o{}", store));
    for (const Ahead& a : s_.ahead)
      if (a.nest == k) names.push_back(name_of(a));
    return names;
  }
  void print_nest_beside(int k) {
    const Nest& n = s_.nests[size_t(k)];
    const int v = last_of(n.loops);
    std::string parameters, captured = "=";
    for (const std::string& name : names_of_lanes(k))
      if (name[0] != 'l') parameters += ", auto& " + name;
    open("auto nest{} = [&](long row, const Totals& of{}) __attribute__((always_inline))", k,
         parameters);
    print_indices();
    std::set<InstrId> needed;
    std::set<int> operands, results(n.stores.begin(), n.stores.end());
    auto buffers = [&](InstrId id) {
      if (!at(id).buffered) return;
      if (at(id).kept_in >= 0)
        results.insert(at(id).kept_in);
      else
        captured += fmt::format(", &b{}", id);
    };
    for (InstrId id : n.values) {
      if (instr(id).kind == InstrKind::kLoad) operands.insert(instr(id).operand);
      for (InstrId x : instr(id).in) need(x, needed);
      buffers(id);
    }
    for (InstrId id : n.reread) buffers(id);
    for (InstrId id : n.reductions) {
      need(instr(id).in[0], needed);
      if (kept(instr(id))) captured += fmt::format(", &c{}", id);
    }
    for (int store : n.stores) need(b_.stores[size_t(store)].value, needed);
    for (int x : operands) print_row_pointer(b_.operands[size_t(x)], "const ", "r", "x", size_t(x));
    for (int y : results) print_row_pointer(b_.stores[size_t(y)].to, "", "w", "y", size_t(y));
    of_piece_ = in_pieces();
    print_needed(needed);
    of_piece_ = false;
    const LoopMask others = ~(LoopMask(1) << v);
    for (int store : n.stores)
      if (s_.streamed[size_t(store)])
        line("o{}.to = &{}, o{}.wanted = apart{};", store,
             element(b_.stores[size_t(store)].to, "y", "w", store, others), store, store);
    for (const Ahead& a : s_.ahead)
      if (a.nest == k)
        line("{}.next = &{} + {};", name_of(a),
             element(b_.operands[size_t(a.operand)], "x", "r", a.operand, others),
             size(a.elements));
    print_body(n, v, lanes_beside(), "return ", captured, ";");
    close("};");
  }
  int64_t lanes_beside() const {
    int64_t most = 1;
    for (const Nest& n : s_.nests) most = std::max(most, lanes_of(n));
    return most;
  }
  std::string strand_text(int k, int64_t count) {
    const Nest& n = s_.nests[size_t(k)];
    // A strand of lines runs ahead of the others in its row, so no other nest may read what it
    // computes in that row: only the last nest qualifies, since it fills no buffer.
    const bool lines = k == last_nest() && lanes_in(n).empty() && streams(n);
    std::string lanes, set;
    for (const std::string& name : names_of_lanes(k))
      lanes += ", " + name, set += name[0] == 'l' ? "" : ", " + name;
    const std::string range =
        in_pieces() ? "block, end_of_piece, " : fmt::format("0, {}, ", size(b_.extents.back()));
    return fmt::format("{}<{}>(on{}, {}nest{}(row{}, of{}{}){})",
                       lines ? "strand_of_lines" : "strand", count, k, lines ? range : "", k, k,
                       lag(k), set, lanes);
  }
  std::string strands_text(int64_t count, int first, size_t indent) {
    std::string text;
    for (int k = last_nest(); k >= first; --k)
      text += fmt::format(",\n{:{}}{}", "", indent, strand_text(k, count));
    return text;
  }
  void print_strands() {
    const int64_t extent = b_.extents.back(), count = lanes_beside();
    const bool cut = extent > kSumBlock;
    if (cut) open("for (long block = 0; block < {}; block += {})", size(extent), kSumBlock);
    for (int k = 0; k <= last_nest(); ++k) print_lanes_of(k, count);
    const std::string range = cut ? fmt::format("block, block + {} < {} ? block + {} : {}",
                                                kSumBlock, size(extent), kSumBlock, size(extent))
                                  : fmt::format("0, {}", size(extent));
    line("beside<{}>({}{});", count, range, strands_text(count, 0, cut ? 13 : 11));
    for (int k = 0; k <= last_nest(); ++k)
      for (InstrId id : lanes_in(s_.nests[size_t(k)]))
        line("{};",
             join(instr(id),
                  at(id).reduce == ReduceAs::kRow ? fmt::format("of{}.s{}", k, id) : total(id),
                  fmt::format("l{}.folded()", id)));
    if (cut) close();
  }
  // Prints what comes before the rows: the maximum of the first piece of the first row.
  void print_first_piece() {
    const int64_t count = lanes_beside();
    print_lanes_of(0, count);
    line("Totals of0;");
    line("const bool on0 = true;");
    line("const long row0 = first;");
    line("beside<{}>(0, {}, {});", count, size(s_.pieces.size), strand_text(0, count));
    line("float next_max = l{}.folded();", s_.pieces.max);
  }
  // Prints the loop over pieces. A step computes the exponentials of one piece, the maximum of the
  // next piece (after the last one, of the next row's first), and the results of the row before.
  void print_strands_in_pieces() {
    const InstrId max = s_.pieces.max, sum = s_.pieces.sum;
    const int64_t piece = s_.pieces.size;
    const int64_t extent = b_.extents.back(), count = lanes_beside();
    open("for (long piece = 0, block = 0; block < {}; ++piece, block += {})", size(extent),
         size(piece));
    line("const bool last = block + {} >= {};", size(piece), size(extent));
    line("const long end_of_piece = last ? {} : block + {};", size(extent), size(piece));
    line("const long next = last ? step + 1 : step, row0 = next < end ? next : first;");
    line("const bool on0 = next < end;");
    for (int k = 0; k <= last_nest(); ++k) print_lanes_of(k, count);
    line("of0.m{}[piece] = next_max;", max);
    line("of0.below = next_max > kLeast ? next_max : kLeast;");
    line("of{}.scale = of{}.m{}[piece];", last_lag(), last_lag(), max);
    line("auto early = early_strand<{}>(last ? -block : {}, last ? {} : {},", count, size(piece),
         size(piece), size(extent));
    line("    {});", strand_text(0, count));
    line("beside<{}>(block, end_of_piece{}, early);", count, strands_text(count, 1, 13));
    line("if (last) beside<{}>({}, block + {}, early);", count, size(extent), size(piece));
    line("next_max = l{}.folded(), of0.p{}[piece] = l{}.folded();", max, sum, sum);
    close();
    line("const Softmax softmax = join_pieces(of0.m{}, of0.p{}, {});", max, sum, size(pieces()));
    line("of0.s{} = softmax.max, of0.s{} = softmax.sum;", max, sum);
  }
  void print_lanes_of(int k, int64_t count) {
    const Nest& n = s_.nests[size_t(k)];
    for (InstrId id : lanes_in(n)) print_lanes(id, count);
    for (int store : n.stores)
      if (s_.streamed[size_t(store)])
        line("Streamed<{}, {}> o{};", memory_type(b_.stores[size_t(store)].to.dtype), count, store);
    for (const Ahead& a : s_.ahead)
      if (a.nest == k)
        line("Ahead<{}, {}, {}> {};", read_type(b_.operands[size_t(a.operand)].dtype), count,
             a.level, name_of(a));
  }
};

}  // namespace tessera::compiler
