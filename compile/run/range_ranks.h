// The ranks that run a range of steps together: those of the groups of its collectives. They launch
// the same graphs, so what one rank finds out alone (what is fast, what cannot be captured) they
// decide together.
// Internal: not part of the public interface.
#pragma once
#include <vector>

#include "compile/run/program.h"

namespace tessera::compiler {

class RangeRanks {
 public:
  RangeRanks(const Program& p, const StepRange& range);
  /// Whether the range has no collectives.
  bool alone() const { return groups_.empty(); }
  /// Reduces `t`, which is on the CPU, over these ranks; all of them have to call it in the same
  /// run.
  void least(const Tensor& t) const;
  void most(const Tensor& t) const;
  /// "world (4), tp (2)": names and sizes of the groups.
  std::string text() const;

 private:
  const CallSite site_;
  std::vector<Ref<ProcessGroup>> groups_;  // in the order of their first collectives
};

}  // namespace tessera::compiler
