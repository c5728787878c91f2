#include "compile/run/range_ranks.h"

#include <fmt/format.h>

#include <algorithm>

#include "collectives/ops.h"

namespace tessera::compiler {

RangeRanks::RangeRanks(const Program& p, const StepRange& range) : site_(p.site) {
  for (int i = range.begin; i < range.end; ++i) {
    const Step& s = p.steps[size_t(i)];
    if (!s.collective) continue;
    const Ref<ProcessGroup> group(&group_of(*s.prim));
    if (std::ranges::find(groups_, group) == groups_.end()) groups_.push_back(group);
  }
}

void RangeRanks::least(const Tensor& t) const {
  for (const Ref<ProcessGroup>& g : groups_) g->all_reduce(t, ReduceOp::kMin, {}, site_);
}
void RangeRanks::most(const Tensor& t) const {
  for (const Ref<ProcessGroup>& g : groups_) g->all_reduce(t, ReduceOp::kMax, {}, site_);
}

std::string RangeRanks::text() const {
  std::string all;
  for (const Ref<ProcessGroup>& g : groups_)
    all += fmt::format("{}{} ({})", all.empty() ? "" : ", ", g->name(), g->size());
  return all;
}

}  // namespace tessera::compiler
