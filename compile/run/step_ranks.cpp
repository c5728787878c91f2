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

GroupCalls& add_calls(std::vector<GroupCalls>& all, const Ref<ProcessGroup>& group, Device device) {
  for (GroupCalls& c : all)
    if (c.group == group && c.device == device) return c;
  return all.emplace_back(group, device);
}

std::vector<GroupCalls> calls_on_devices(const Graph& graph) {
  std::vector<GroupCalls> all;
  for (const Node& n : graph.nodes) {
    if (!is_collective(*n.prim)) continue;
    const Meta& operand = graph[n.in[0]].meta;
    if (operand.device.is_cpu()) continue;
    const Ref<ProcessGroup> group(&group_of(*n.prim));
    GroupCalls& calls = add_calls(all, group, operand.device);
    calls.hash = mixed(calls.hash, hash_collective(*n.prim, operand));
  }
  return all;
}

void StepRanks::expect(std::vector<GroupCalls> groups) {
  expected_ = std::move(groups);
  for (GroupCalls& c : expected_) c.hash = c.cut = 0;
}

RunState StepRanks::agree(std::span<const GroupCalls> calls, RunState mine) {
  const auto moved_by_nccl = [](const GroupCalls& c) {
    return c.group->backend(c.device) == "nccl";
  };
  if (std::ranges::none_of(calls, moved_by_nccl)) return mine;
  std::vector<GroupCalls> all_calls = expected_;
  for (const GroupCalls& c : calls) add_calls(all_calls, c.group, c.device) = c;
  std::vector<const GroupCalls*> voters;
  for (const GroupCalls& c : all_calls)
    if (moved_by_nccl(c)) voters.push_back(&c);
  EagerScope eager;                     // a call may be recorded meanwhile
  const std::string* differ = nullptr;  // the first group whose ranks do
  // Ranks of one group may find out what those of another group have to know. So all groups compare
  // before one of them decides: those of which a member votes in another group, too, compare twice.
  const bool only = voters.size() == 1;
  std::vector<const GroupCalls*> left = voters;
  for (int turn = 0; turn < 2; ++turn) {
    std::vector<const GroupCalls*> again;
    for (const GroupCalls* c : left) {
      const uint64_t cut = mine.stage > RunState::kByGraphs ? c->cut : 0;
      const uint64_t hash = mixed(mixed(c->hash, cut), uint64_t(mine.stage));
      const int64_t run = int64_t(hash >> 2);  // -run fits, too
      const Tensor all =
          from_values<int64_t>({run, -run, differ == nullptr, mine.can, !mine.moved, only}, {6});
      c->group->all_reduce(all, ReduceOp::kMin, {}, site_);
      const auto v = all.values<int64_t>();
      if (!differ && (v[0] != -v[1] || !v[2])) differ = &c->group->name();
      mine.can = v[3], mine.moved = !v[4];
      if (!v[5]) again.push_back(c);
    }
    left = std::move(again);
  }
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
