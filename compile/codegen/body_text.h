// The text of what a nest does with an element: a body that the loops of steps call for each lane
// (prologue.h). Some functions run on groups of floats; a body with such functions has two parts,
// one that computes their operands and one that uses their results.
#pragma once
#include <set>
#include <string>
#include <vector>

#include "compile/codegen/value_text.h"

namespace tessera::compiler {

class BodyText : protected ValueText {
 protected:
  using ValueText::ValueText;

  // Whether a nest computes values in groups of floats.
  bool in_groups(const Nest& n) const { return !parts_of(n).groups.empty(); }

  // The number of elements in a step. Functions on groups wait for their lookups and
  // multiplications in turn, so a nest that has nothing else to wait for takes twice as many
  // elements at once.
  int64_t step_of(const Nest& n) const {
    const int64_t count = lanes_of(n), extent = b_.extents[size_t(last_of(n.loops))];
    const bool wide = lanes_in(n).empty() && count == kMaxLanes && extent >= 2 * count;
    return wide && in_groups(n) ? 2 * count : count;
  }

  // Prints the body of nest `n`. A body that compares the index with positions names these
  // positions.
  void print_body(const Nest& n, int v, int64_t lanes, const std::string& before,
                  const std::string& captured, const std::string& after) {
    std::string positions;
    for (InstrId id : n.values) {
      auto c = as_position_.find(id);
      if (c != as_position_.end() && c->second.loop == v)
        positions += fmt::format(", t{}", c->second.position);
    }
    const bool asks = !positions.empty();
    std::string terms;
    for (InstrId id : lanes_in(n)) terms += fmt::format(", auto& l{}", id);
    for (int k : n.stores)
      if (s_.streamed[size_t(k)]) terms += fmt::format(", auto& o{}", k);
    if (looks_ahead(n)) terms += ", auto&...";
    const std::string begin = before + (asks ? "asking(" : ""),
                      end = positions + (asks ? ")" : "") + after,
                      lane = fmt::format("long i{}, long l{}", v, asks ? ", bool asked" : "");
    const Parts parts = parts_of(n);
    lane_loop_ = v, widened_ = parts.bytes;
    if (!parts.staged()) {
      open("{}[{}]({}{}) {}", begin, captured, lane, terms, kInline);
      print_element(n, v);
      close(("}" + end).c_str());
    } else {
      const std::ptrdiff_t nest = &n - s_.nests.data();
      print_step(parts, nest, lanes);
      open("{}staged<Step{}>([=](long i{}, long n, auto& step) {}", begin, nest, v, kInline);
      for (InstrId id : parts.bytes)
        line("step.v{}.widen(&{}, n);", id, operand(instr(id).operand));
      close("},");
      if (parts.groups.empty()) {
        line("Nothing(), Nothing(),");
      } else {
        open("[{}]({}, auto& step) {}", captured, lane, kInline);
        print_before(n, v, parts);
        close("},");
        open("[](auto& step) {}", kInline);
        for (InstrId id : parts.groups)
          line("step.v{}.become([](auto x) {} {{ return {}(x); }});", id, kInline,
               group_function(id));
        close("},");
      }
      open("[{}]({}, auto& step{}) {}", captured, lane, terms, kInline);
      print_after(n, v, parts);
      close(("})" + end).c_str());
    }
    lane_loop_ = -1, widened_.clear();
  }

 private:
  static constexpr const char* kInline = "__attribute__((always_inline))";

  // Sorts the values of the last loop. `groups` are computed in groups. `before` are the values
  // that these are computed from, `after` those that results and totals need, whether they follow
  // from groups or not. `held` are in both and not worth computing twice. `bytes` are widened
  // before everything else.
  struct Parts {
    std::vector<InstrId> groups;
    std::set<InstrId> bytes, before, after, held;
    bool staged() const { return !groups.empty() || !bytes.empty(); }
  };
  Parts parts_of(const Nest& n) const {
    const int v = last_of(n.loops);
    std::set<InstrId> here, follow;  // values of this loop, and those computed from groups
    for (const auto& list : {n.values, n.reread})
      for (InstrId id : list)
        if (last_of(instr(id).loops) == v) here.insert(id);
    Parts p;
    for (InstrId id : n.values) {
      if (!here.contains(id)) continue;
      if (s_.widened(n, id)) p.bytes.insert(id);
      const bool group = !group_function(id).empty(),
                 follows =
                     std::ranges::any_of(instr(id).in, [&](auto x) { return follow.contains(x); });
      if (group && !follows) p.groups.push_back(id);
      if (follows || group) follow.insert(id);
    }
    if (!p.staged()) return p;
    auto need = [&](auto& self, InstrId id, std::set<InstrId>& found, bool through) -> void {
      if (!here.contains(id) || !found.insert(id).second) return;
      if (std::ranges::count(n.reread, id)) return;
      // A group's last operand is then not needed.
      const bool known = !through && std::ranges::count(p.groups, id);
      for (size_t k = 0; k + known < instr(id).in.size(); ++k)
        self(self, instr(id).in[k], found, through);
    };
    for (InstrId id : p.groups) need(need, instr(id).in.back(), p.before, true);
    for (InstrId id : n.reductions) need(need, instr(id).in[0], p.after, false);
    for (int k : n.stores) need(need, b_.stores[size_t(k)].value, p.after, false);
    for (InstrId id : n.values)
      if (at(id).buffered && !p.before.contains(id)) need(need, id, p.after, false);
    for (InstrId id : p.before)
      if (at(id).kept_in >= 0) p.after.insert(id);
    for (InstrId id : p.after) {
      const bool cheap = instr(id).kind == InstrKind::kIndex || instr(id).kind == InstrKind::kLoad;
      if (p.before.contains(id) && !cheap && !std::ranges::count(n.reread, id)) p.held.insert(id);
    }
    return p;
  }

  void print_step(const Parts& p, std::ptrdiff_t nest, int64_t count) {
    open("struct Step{}", nest);
    for (InstrId id : p.bytes) line("Bytes<{}> v{};", count, id);
    for (InstrId id : p.groups) line("Held<float, {}> v{};", count, id);
    for (InstrId id : p.held) {
      const DType t = instr(id).dtype;
      line("Held<{}, {}> v{};", t == kBool ? "int" : register_type(t), count, id);
    }
    close("};");
  }
  void print_before(const Nest& n, int v, const Parts& p) {
    print_level(n, v, &p.before);
    for (InstrId id : p.groups) line("step.v{}[l] = v{};", id, instr(id).in.back());
    for (InstrId id : p.held) line("step.v{}[l] = v{};", id, id);
  }
  void print_after(const Nest& n, int v, const Parts& p) {
    std::set<InstrId> rest = p.after;
    for (InstrId id : p.held) {
      const std::string held = fmt::format("step.v{}[l]", id);
      line("const {} v{} = {};", register_type(instr(id).dtype), id,
           instr(id).dtype == kBool ? loaded(kBool, held) : held);
      rest.erase(id);
    }
    after_groups_.insert(p.groups.begin(), p.groups.end());
    print_level(n, v, &rest);
    after_groups_.clear();
    print_kept(n, v);
    print_uses(n);
  }
};

}  // namespace tessera::compiler
