// What the ranks of a compiled function agree on before each run of a graph whose collectives NCCL
// moves: that they run the same calls in the same way. NCCL demands it: a call lies in windows on
// all ranks or on none, and is part of a graph on all, which they captured together, or on none. A
// rank alone may come to need another way: it has a call of another size, its memory is elsewhere,
// it runs out of memory, it cannot capture. So each run begins with a vote on the host, and ranks
// that differ go apart for good: collectives are then submitted one by one, in ordinary memory. A
// rank with several groups tells one what it heard in another, which reaches all ranks of a grid of
// groups. A rank that reads values runs several graphs where others run one; it votes before each
// of them in all groups of its call, since the others do.
// Internal: not part of the public interface.
#pragma once
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "collectives/process_group.h"
#include "compile/ir/graph.h"

namespace tessera::compiler {

/// The collectives of a graph on tensors of one device that have one group.
struct GroupCalls {
  Ref<ProcessGroup> group;
  Device device;
  uint64_t hash = 0;  // of kinds, operators, dtypes and counts, in order
  uint64_t cut = 0;   // of which of them are captured together; it counts from kByGraphs on
};
/// Those of `group` on `device` in the list, at whose end they are added where there are none.
GroupCalls& add_calls(std::vector<GroupCalls>& all, const Ref<ProcessGroup>& group, Device device);
/// Those on devices, in the order of the groups' first calls.
std::vector<GroupCalls> calls_on_devices(const Graph& graph);

/// How a rank goes about a run.
struct RunState {
  enum Stage : int64_t {
    kInterpreted = 1,  // op by op
    kSized,            // as one of many sizes, which rank by rank may differ
    kFirst,            // by an executor for the first time
    kStepByStep,       // without graphs
    kByGraphs,         // kByGraphs + n: the n-th run since graphs were begun anew
  };
  int64_t stage = kInterpreted;
  bool can = true;     // false: this rank has to go step by step
  bool moved = false;  // graphs have to be captured again
};

class StepRanks {
 public:
  /// `name`: of the function, in messages; `site`: where it was compiled, equal on all ranks.
  explicit StepRanks(std::string name, CallSite site = CallSite::current())
      : name_(std::move(name)), site_(site) {}
  /// The call site of what ranks decide together on the host, in errors.
  const CallSite& site() const { return site_; }
  /// The groups in which all votes are from now on, beside those of the graphs: where a call runs
  /// several graphs, those of all of them, as far as they are known.
  void expect(std::vector<GroupCalls> groups);
  /// False: ranks went apart, and nobody votes any more.
  bool together() const { return together_; }
  /// Called by all ranks before a run while together(), with the calls of its graph; without a vote
  /// where NCCL moves none of them. Returns what holds for all: `can` is false where one rank
  /// cannot, `moved` true where one rank's memory moved. Afterwards together() is false where the
  /// stages, calls or cuts of two ranks of a group differ.
  RunState agree(std::span<const GroupCalls> calls, RunState mine);

 private:
  const std::string name_;
  const CallSite site_;
  std::vector<GroupCalls> expected_;  // without calls
  bool together_ = true;
};

}  // namespace tessera::compiler
