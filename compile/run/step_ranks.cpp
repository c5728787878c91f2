#include "compile/run/step_ranks.h"

#include <algorithm>

#include "collectives/ops.h"
#include "core/base/log.h"
#include "core/dispatch/target.h"
#include "core/ops/create.h"

namespace tessera::compiler {
namespace {

uint64_t mixed(uint64_t h, uint64_t x) { return (h ^ x) * 0x9e3779b97f4a7c15ull; }

}  // namespace

std::vector<GroupCalls> calls_on_devices(const Graph& graph) {
  std::vector<GroupCalls> all;
  for (const Node& n : graph.nodes) {
    if (!is_collective(*n.prim)) continue;
    const Meta& operand = graph[n.in[0]].meta;
    if (operand.device.is_cpu()) continue;
    const Ref<ProcessGroup> group(&group_of(*n.prim));
    auto at = std::ranges::find_if(
        all, [&](const GroupCalls& c) { return c.group == group && c.device == operand.device; });
    if (at == all.end()) at = all.insert(at, {group, operand.device});
    at->hash = mixed(at->hash, hash_collective(*n.prim, operand));
  }
  return all;
}

RunState StepRanks::agree(std::span<const GroupCalls> calls, RunState mine) {
  std::vector<const GroupCalls*> voters;
  for (const GroupCalls& c : calls)
    if (c.group->backend(c.device) == "nccl") voters.push_back(&c);
  EagerScope eager;                     // a call may be recorded meanwhile
  const std::string* differ = nullptr;  // the first group whose ranks do
  // Ranks of one group may find out what those of another group have to know. So all groups compare
  // before one of them decides: those of which a member votes in another group, too, compare twice.
  const bool only = voters.size() == 1;
  std::vector<const GroupCalls*> left = voters;
  for (int turn = 0; turn < 2; ++turn) {
    std::vector<const GroupCalls*> again;
    for (const GroupCalls* c : left) {
      const int64_t run = int64_t(mixed(c->hash, uint64_t(mine.stage)) >> 2);  // -run fits, too
      const Tensor all =
          from_values<int64_t>({run, -run, differ == nullptr, mine.can, !mine.moved, only}, {6});
      c->group->all_reduce(all, ReduceOp::kMin);
      const auto v = all.values<int64_t>();
      if (!differ && (v[0] != -v[1] || !v[2])) differ = &c->group->name();
      mine.can = v[3], mine.moved = !v[4];
      if (!v[5]) again.push_back(c);
    }
    left = std::move(again);
  }
  if (voters.empty()) return mine;
  if (differ && voters[0]->group->rank() == 0)
    logging::warn(
        "compile: ranks of {} that call {} run it in different ways at the same time, so for the "
        "rest of the run its collectives are no part of CUDA graphs; where their calls differ in "
        "size, as a last batch may, drop or pad it",
        *differ, name_);
  together_ = !differ;
  return mine;
}

}  // namespace tessera::compiler
