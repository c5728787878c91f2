// Prints values, and what a nest does with an element; print_cpp.cpp puts these texts into its
// loops.
#pragma once
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "compile/codegen/functors.h"
#include "compile/codegen/kernel_text.h"
#include "compile/codegen/softmax.h"
#include "core/base/boundary.h"

namespace tessera::compiler {

class ValueText : protected KernelText {
 protected:
  using KernelText::KernelText;

  // ---- indices as positions ----

  struct Comparison {
    int loop;
    InstrId position;
  };
  // Whether the nest compares a position with the index of loop `v`.
  bool compares(const Nest& n, int v) const {
    return std::ranges::any_of(n.values, [&](InstrId id) {
      auto c = as_position_.find(id);
      return c != as_position_.end() && c->second.loop == v;
    });
  }

  // Finds comparisons eq(index, v) with v constant in the row. v becomes an int, -1 when out of
  // range, so that the comparison is as wide as the floats beside it.
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

  // ---- values ----

  // In lanes, the start of the step is subtracted from the position, and the result is compared
  // with the lane numbers, which are a constant vector.
  std::string position_text(const Comparison& c) const {
    if (lane_loop_ != c.loop) return fmt::format("int(i{}) == t{}", c.loop, c.position);
    return fmt::format("asked & (int(l) == t{} - int(i{} - l))", c.position, c.loop);
  }

  std::string value_text(InstrId id) {
    const Instr& i = instr(id);
    switch (i.kind) {
      case InstrKind::kLoad:
        return loaded(i.dtype,
                      widened_.contains(id) ? fmt::format("step.v{}[l]", id) : operand(i.operand));
      case InstrKind::kConstant: return constant(i);
      case InstrKind::kIndex: return fmt::format("i{}", i.loop);
      case InstrKind::kReduce:
        return finished(i, at(id).place == Place::kElement
                               ? fmt::format("a{}[{}]", id, dense(kept(i)))
                               : fmt::format("s{}", id));
      default: break;
    }
    if (after_groups_.contains(id)) return from_group(id, fmt::format("step.v{}[l]", id));
    if (is_softmax_exp(s_, id)) return fmt::format("exp_by_table(v{})", i.in[0]);
    if (i.kind == InstrKind::kPointwise && i.op == "div" && is_softmax_sum(s_, i.in[1]))
      return fmt::format("v{} * q{}", i.in[0], i.in[1]);
    auto position = as_position_.find(id);
    return position != as_position_.end() ? position_text(position->second) : expression(b_, i);
  }
  // The name of the function that computes a value, if it has a form for groups of floats; else "".
  // It is applied to the last operand.
  std::string group_function(InstrId id) const {
    const Instr& i = instr(id);
    if (is_softmax_exp(s_, id)) return "exp_by_table";
    if (i.kind != InstrKind::kPointwise || register_type(i.dtype) != "float") return {};
    const Functor* functor = find_functor(i.op);
    return functor && functor->in_groups ? "fn::" + i.op : std::string();
  }
  // The text of the value that follows from such a function's `result`. An op with two operands is
  // a derivative.
  std::string from_group(InstrId id, const std::string& result) const {
    const Instr& i = instr(id);
    return rounded(i.dtype, i.in.size() == 1 ? result : fmt::format("v{} * {}", i.in[0], result));
  }
  void print_value(InstrId id) {
    line("const {} v{} = {};", register_type(instr(id).dtype), id, value_text(id));
    if (is_softmax_sum(s_, id))
      line("const float q{} = {} / v{};", id, of_piece_ ? "of.scale" : "1.0f", id);
    auto position = positions_.find(id);
    if (position != positions_.end())
      line("const int t{} = position(v{}, {});", id, id, size(position->second));
  }
  // Prints the values of rows that are ready once the nests of stages below `stage` have run.
  void print_row_values(Place place, int stage) {
    for (size_t k = 0; k < b_.instrs.size(); ++k)
      if (s_.values[k].used && s_.values[k].place == place && s_.values[k].stage == stage)
        print_value(InstrId(k));
  }

  // ---- rows ----

  // Bools are read as bytes: GCC 12 does not vectorise loops that read bool.
  static std::string read_type(DType t) { return t == kBool ? "unsigned char" : memory_type(t); }
  void print_indices() {
    int64_t inside = 1;
    if (s_.block > 0) {
      const int v = s_.loops() - 1;
      int64_t extent = b_.extents[size_t(v)], pieces = (extent + s_.block - 1) / s_.block;
      line("const long begin{} = row % {} * {}, end{} = begin{} + {} < {} ? begin{} + {} : {};", v,
           size(pieces), size(s_.block), v, v, size(s_.block), size(extent), v, size(s_.block),
           size(extent));
      inside = pieces;
    }
    for (int l = s_.outer - 1; l >= 0; --l) {
      std::string text = "row";
      if (inside > 1) text += fmt::format(" / {}", size(inside));
      if (l > 0) text += fmt::format(" % {}", size(b_.extents[size_t(l)]));
      line("const long i{} = {};", l, text);
      inside *= b_.extents[size_t(l)];
    }
  }
  void print_row_pointer(const Access& a, const char* constness, const char* row, const char* base,
                         size_t k) {
    if (!(moving_loops(a) & outer()) || !(moving_loops(a) & inner())) return;
    const std::string type = *constness ? read_type(a.dtype) : memory_type(a.dtype);
    line("{}{}* {}{} = {}{} + {};", constness, type, row, k, base, k, offset(a, outer()));
  }
  void print_operand_rows() {
    for (size_t k = 0; k < b_.operands.size(); ++k)
      print_row_pointer(b_.operands[k], "const ", "r", "x", k);
  }
  void print_buffers() {
    for (size_t k = 0; k < b_.instrs.size(); ++k)
      if (s_.values[k].buffered && s_.values[k].kept_in < 0)
        line("alignas(64) {} b{}[{}];", buffer_type(b_.instrs[k].dtype), k,
             capacity(s_.count(b_.instrs[k].loops & inner())));
  }
  void print_row_end() {
    for (int k : s_.row_stores) {
      const Store& s = b_.stores[size_t(k)];
      line("{} = {};", result(k), stored(s.to.dtype, fmt::format("v{}", s.value)));
    }
    for (InstrId id : s_.row_reductions)
      line("{};", join(instr(id), fmt::format("c{}", id), fed(instr(id))));
  }
  void print_pick(InstrId id) {
    const Instr &where = instr(instr(id).in[0]), &x = instr(where.in[1]);
    const Comparison& c = as_position_.at(where.in[0]);
    line("double s{} = 0.0;", id);
    line("if (const long i{} = t{}; i{} >= 0) s{} += {};", c.loop, c.position, c.loop, id,
         loaded(x.dtype, operand(x.operand)));
  }

  // ---- elements ----

  static std::string buffer_type(DType t) { return t == kBool ? read_type(t) : register_type(t); }
  std::string buffer(InstrId id) {
    return at(id).kept_in >= 0 ? result(at(id).kept_in)
                               : fmt::format("b{}[{}]", id, dense(instr(id).loops & inner()));
  }
  // Prints the values whose last loop is `l`. If `part` is given, prints only those in it and keeps
  // none in a result: the result may lie over an operand, and everything is read before that is
  // written.
  void print_level(const Nest& n, int l, const std::set<InstrId>* part = nullptr) {
    auto here = [&](InstrId id) {
      return last_of(instr(id).loops) == l && (!part || part->contains(id));
    };
    for (InstrId id : n.reread)
      if (here(id))
        line("const {} v{} = {};", register_type(instr(id).dtype), id,
             instr(id).dtype == kBool ? loaded(kBool, buffer(id)) : buffer(id));
    for (InstrId id : n.values) {
      if (!here(id)) continue;
      print_value(id);
      if (at(id).buffered && at(id).kept_in < 0) line("{} = v{};", buffer(id), id);
    }
    if (!part) print_kept(n, l);
  }
  void print_kept(const Nest& n, int l) {
    for (InstrId id : n.values)
      if (at(id).kept_in >= 0 && last_of(instr(id).loops) == l) line("{} = v{};", buffer(id), id);
  }
  // Prints what the nest does with its values: reductions, stores, buffers.
  void print_uses(const Nest& n) {
    for (InstrId id : n.reductions) {
      const Instr& i = instr(id);
      line("{};", reduces_vector(i, n) ? fmt::format("l{}[l] = {}", id, fed(i))
                                       : join(i, total(id), fed(i)));
    }
    for (int k : n.stores) {
      const Store& s = b_.stores[size_t(k)];
      line("{} = {};", s_.streamed[size_t(k)] ? fmt::format("o{}[l]", k) : result(k),
           stored(s.to.dtype, fmt::format("v{}", s.value)));
    }
  }
  void print_element(const Nest& n, int v) {
    print_level(n, v);
    print_uses(n);
  }
  // The name of the running total that reduction `id` adds to inside its nest.
  std::string total(InstrId id) {
    const Instr& i = instr(id);
    const char* prefix = at(id).reduce == ReduceAs::kChunk ? "c" : kept(i) ? "a" : "s";
    return kept(i) ? fmt::format("{}{}[{}]", prefix, id, dense(kept(i)))
                   : fmt::format("{}{}", prefix, id);
  }
  std::vector<InstrId> lanes_in(const Nest& n) const {
    std::vector<InstrId> list;
    for (InstrId id : n.reductions)
      if (reduces_vector(instr(id), n)) list.push_back(id);
    return list;
  }
  bool looks_ahead(const Nest& n) const {
    return std::ranges::any_of(s_.ahead,
                               [&](const Ahead& a) { return &n == &s_.nests[size_t(a.nest)]; });
  }
  static std::string name_of(const Ahead& a) { return fmt::format("h{}_{}", a.operand, a.level); }
  bool streams(const Nest& n) const {
    return std::ranges::any_of(n.stores, [&](int k) { return s_.streamed[size_t(k)]; });
  }
  int64_t lanes_of(const Nest& n) const {
    const int64_t extent = b_.extents[size_t(last_of(n.loops))];
    const bool bytes = s_.touches_bytes(n);
    int64_t count = 1, most = bytes ? kMaxLanesOfBytes : kMaxLanes;
    if (bytes)
      meet("generated.byte_lanes", extent);
    else
      meet("generated.lanes", extent);
    while (count < most && count < extent) count *= 2;
    return count;
  }
  void print_lanes(InstrId id, int64_t count) {
    std::string kind = reduction_type(instr(id).reduce);
    if (may_pass_over_nan(s_, id)) kind = fmt::format("Numbers<{}>", kind);
    line("Lanes<{}, {}, {}> l{};", kind, lane_type(instr(id)), count, id);
  }
  // By position: the extent of the index it is compared with.
  std::map<InstrId, int64_t> positions_;
  std::map<InstrId, Comparison> as_position_;  // comparisons of indices and positions
  std::set<InstrId> after_groups_;             // values that the step holds as results of groups
  int lane_loop_ = -1;                         // the loop whose lanes `l` counts
  std::set<InstrId> widened_;                  // bytes that the body being printed has widened
  bool of_piece_ = false;                      // values of rows are those of the element's piece
};

}  // namespace tessera::compiler
