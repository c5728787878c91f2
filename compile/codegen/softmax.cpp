#include "compile/codegen/softmax.h"

#include <algorithm>

namespace tessera::compiler {

bool is_exp_below_max(const Schedule& s, InstrId id) {
  const Instr& i = s.instr(id);
  if (i.kind != InstrKind::kPointwise || i.op != "exp" || i.dtype != kF32) return false;
  const Instr& d = s.instr(i.in[0]);
  if (d.kind != InstrKind::kPointwise || d.op != "sub") return false;
  const Instr& m = s.instr(d.in[1]);
  return m.kind == InstrKind::kReduce && m.reduce == ReduceKind::kMax && m.in[0] == d.in[0];
}

bool is_softmax_sum(const Schedule& s, InstrId id) {
  const Instr& i = s.instr(id);
  return i.kind == InstrKind::kReduce && i.reduce == ReduceKind::kSum &&
         s.at(id).place == Place::kRow && is_exp_below_max(s, i.in[0]);
}

// Values follow from the maximum, from the sum, or, where arithmetic joins both, are NaN if the sum
// is. None of the first kind may be a result.
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
    static const char* keep_nan[] = {"add", "sub", "mul", "div", "neg", "log"};
    const bool keeps = i.kind == InstrKind::kPointwise && is_floating(i.dtype) &&
                       std::ranges::count(keep_nan, i.op) > 0;
    auto reads = [&](Follows f) {
      return std::ranges::any_of(i.in, [&](InstrId x) { return of[size_t(x)] == f; });
    };
    of[k] = keeps && reads(kSum) ? kSum : reads(kMax) ? kMax : kNothing;
  }
  return std::ranges::count(of, kSum) > 0 &&
         std::ranges::none_of(s.body.stores,
                              [&](const Store& store) { return of[size_t(store.value)] == kMax; });
}

}  // namespace tessera::compiler
