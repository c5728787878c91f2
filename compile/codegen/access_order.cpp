#include "compile/codegen/access_order.h"

#include <algorithm>

#include "compile/codegen/expressions.h"
#include "compile/codegen/generate.h"
#include "compile/codegen/loops.h"

namespace tessera::compiler {

bool AccessOrder::may_overwrite(int operand, int result) const {
  const Access &from = s_.body.operands[size_t(operand)], &to = s_.body.stores[size_t(result)].to;
  if (from.dtype != to.dtype || !std::ranges::equal(from.strides, to.strides)) return false;
  const Write write = first_write(result);
  const int read = last_read(operand);
  return read < write.moment || (read == write.moment && !write.again);
}

bool AccessOrder::may_wait_in(InstrId id, int result) const {
  const Instr& i = s_.instr(id);
  const Access& to = s_.body.stores[size_t(result)].to;
  const bool as_it_is = i.dtype != kBool && to.dtype == i.dtype &&
                        memory_type(i.dtype) == register_type(i.dtype) &&
                        (moving_loops(to) & s_.inner_mask()) == (i.loops & s_.inner_mask());
  const bool alone =
      std::ranges::none_of(s_.values, [&](const Placed& p) { return p.kept_in == result; });
  const int stored = stored_in(result);
  return as_it_is && alone && stored > computed_in(id) && stored >= last_reread_in(id);
}

int AccessOrder::computed_in(InstrId id) const {
  for (size_t n = 0; n < s_.nests.size(); ++n)
    if (std::ranges::count(s_.nests[n].values, id)) return int(n);
  return -1;
}
int AccessOrder::last_reread_in(InstrId id) const {
  for (size_t n = s_.nests.size(); n-- > 0;)
    if (std::ranges::count(s_.nests[n].reread, id)) return int(n);
  return -1;
}

// Elements are picked between the first two nests if rows come in pieces, else before the first
// nest.
int AccessOrder::moment_of_nest(int nest) const {
  return nest < moment_of_picks() ? nest : nest + 1;
}

int AccessOrder::stored_in(int result) const {
  for (size_t n = 0; n < s_.nests.size(); ++n)
    if (std::ranges::count(s_.nests[n].stores, result)) return int(n);
  return -1;
}

AccessOrder::Write AccessOrder::first_write(int result) const {
  if (std::ranges::count(s_.late_stores, result)) return {moment_of_the_end()};
  if (std::ranges::count(s_.row_stores, result)) return {moment_of_row_end()};
  int nest = stored_in(result);
  for (size_t id = 0; id < s_.values.size(); ++id)
    if (s_.values[id].kept_in == result) nest = std::min(nest, computed_in(InstrId(id)));
  const LoopMask moving = moving_loops(s_.body.stores[size_t(result)].to);
  return {moment_of_nest(nest), !within(s_.nests[size_t(nest)].loops, moving)};
}

bool AccessOrder::loads(InstrId id, int operand) const {
  const Instr& i = s_.instr(id);
  return i.kind == InstrKind::kLoad && i.operand == operand;
}

// True if a value that follows from sums over rows reads the operand: it is computed between the
// stores at the end.
bool AccessOrder::read_at_the_end(int operand) const {
  std::vector<bool> needed(s_.values.size());
  for (size_t k = needed.size(); k-- > 0;) {
    const Placed& p = s_.values[k];
    if (!p.used || p.reduce != ReduceAs::kNone || !(needed[k] || p.place == Place::kLate)) continue;
    if (loads(InstrId(k), operand)) return true;
    for (InstrId x : s_.instr(InstrId(k)).in) needed[size_t(x)] = true;
  }
  return false;
}

int AccessOrder::last_read(int operand) const {
  if (read_at_the_end(operand)) return moment_of_the_end() + 1;
  int last = -1;
  for (size_t k = 0; k < s_.values.size(); ++k) {
    const InstrId id = InstrId(k);
    const Placed& p = s_.values[k];
    if (!p.used) continue;
    if (p.reduce == ReduceAs::kPick && loads(s_.instr(s_.instr(id).in[0]).in[1], operand))
      last = std::max(last, moment_of_picks());
    if (!loads(id, operand)) continue;
    // Each nest may read values that its row has once, and so may what is stored at the end of the
    // row.
    if (p.place != Place::kElement) last = std::max(last, moment_of_row_end());
    for (size_t n = 0; n < s_.nests.size(); ++n)
      if (std::ranges::count(s_.nests[n].values, id)) last = std::max(last, moment_of_nest(int(n)));
  }
  return last;
}

}  // namespace tessera::compiler
