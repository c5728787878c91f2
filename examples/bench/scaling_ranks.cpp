#include "examples/bench/scaling_ranks.h"

#include <algorithm>

#include "collectives/process_group.h"
#include "core/base/parallel.h"
#include "core/ops/create.h"
#include "examples/bench/measure.h"

namespace tessera::bench {
namespace {

constexpr Millis kPatience = std::chrono::minutes(10);  // a phase of a large model takes a while
constexpr int kWarmup =
    4;  // buckets are built again after the first step, a compiled step is traced

double ms_a_step(Workload& work, int steps) {
  Stopwatch watch;
  for (int i = 0; i < steps; ++i) work.step();
  return watch.seconds() * 1e3 / steps;
}

double mean_over_ranks(ProcessGroup& group, double value) {
  Tensor t = from_values<double>({value}, {1});
  group.all_reduce(t, ReduceOp::kAvg, kPatience);
  return t.item<double>();
}

/// Rank 0's number, on every rank.
int agreed(ProcessGroup& group, int64_t value) {
  Tensor t = from_values<int64_t>({value}, {1});
  group.broadcast(t, 0, kPatience);
  return int(t.item<int64_t>());
}

std::vector<int64_t> cores_of_ranks(ProcessGroup& group) {
  std::vector<int> mine = allowed_cores();
  Tensor all = zeros({group.size()}, {.dtype = kI64});
  group.all_gather(all, from_values<int64_t>({mine.size() == 1 ? mine[0] : -1}, {1}));
  return {all.data<int64_t>(), all.data<int64_t>() + group.size()};
}

}  // namespace

nlohmann::ordered_json measure_scaling(const RankOptions& o) {
  set_num_threads(1);
  Ref<ProcessGroup> group = init_process_group();
  Workload alone(o.workload), together(o.workload, group);
  for (int i = 0; i < kWarmup; ++i) alone.step(), together.step();
  if (o.workload.compile)
    for (Workload* w : {&alone, &together})
      TESSERA_CHECK(w->compile_report().replays > 0,
                    "bench scaling: --compile: the step is not replayed: {}",
                    w->compile_report().why_not);
  int steps = o.steps;
  if (steps == 0)
    steps = agreed(*group, std::clamp<int64_t>(int64_t(500 / ms_a_step(alone, 1)), 1, 200));
  std::vector<double> solo, unconnected, ddp;
  for (int r = 0; r < o.rounds; ++r) {
    group->barrier(kPatience);
    if (group->rank() == 0) solo.push_back(ms_a_step(alone, steps));
    group->barrier(kPatience);
    unconnected.push_back(mean_over_ranks(*group, ms_a_step(alone, steps)));
    group->barrier(kPatience);
    ddp.push_back(mean_over_ranks(*group, ms_a_step(together, steps)));
  }
  nlohmann::ordered_json result{
      {"batch_size", together.batch_size()}, {"steps", steps}, {"solo_ms", solo},
      {"unconnected_ms", unconnected},       {"ddp_ms", ddp},  {"cores", cores_of_ranks(*group)},
      {"backend", group->backend()}};
  destroy_process_group();
  return result;
}

}  // namespace tessera::bench
