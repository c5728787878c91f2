#include "examples/bench/scaling_ranks.h"

#include <algorithm>
#include <ctime>
#include <optional>

#include "collectives/process_group.h"
#include "core/base/error.h"
#include "core/base/parallel.h"
#include "core/dispatch/default_device.h"
#include "core/ops/create.h"
#include "examples/bench/device.h"
#include "examples/bench/measure.h"

namespace tessera::bench {
namespace {

constexpr Millis kPatience = std::chrono::minutes(10);  // a phase of a large model takes a while
constexpr int kWarmup =
    4;  // buckets are built again after the first step, a compiled step is traced

double processor_ms() {
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return double(t.tv_sec) * 1e3 + double(t.tv_nsec) * 1e-6;
}

// The time of a step of one rank in one phase.
struct Phase {
  double ms, processor_ms;  // processor time is of all threads of the rank
};

/// If a group is given, its ranks end each step together.
Phase run_phase(Workload& work, int steps, ProcessGroup* group = nullptr) {
  const double before = processor_ms();
  Stopwatch watch;
  Tensor loss;
  for (int i = 0; i < steps; ++i) {
    loss = work.enqueue();
    if (!group) continue;
    loss.item<double>();
    group->barrier(kPatience);
  }
  loss.item<double>();  // a device has then done all steps
  return {watch.seconds() * 1e3 / steps, (processor_ms() - before) / steps};
}

double mean_over_ranks(ProcessGroup& group, double value) {
  Tensor t = from_values<double>({value}, {1});
  group.all_reduce(t, ReduceOp::kAvg, kPatience);
  return t.item<double>();
}

/// Returns rank 0's number on every rank.
int agreed(ProcessGroup& group, int64_t value) {
  Tensor t = from_values<int64_t>({value}, {1});
  group.broadcast(t, 0, kPatience);
  return int(t.item<int64_t>());
}

std::vector<int64_t> cores_of_ranks(ProcessGroup& group) {
  std::vector<int> mine = allowed_cores();
  Tensor all = zeros({group.size()}, {.dtype = kI64, .device = kCPU});
  group.all_gather(all, from_values<int64_t>({mine.size() == 1 ? mine[0] : -1}, {1}));
  return {all.data<int64_t>(), all.data<int64_t>() + group.size()};
}

/// What a rank trains on where it is not alone.
WorkloadOptions share_of(const RankOptions& o, int ranks) {
  WorkloadOptions share = o.workload;
  if (!o.strong) return share;
  const int64_t usual = models::find_model("bench", share.model).bench_batch_size,
                batch = share.batch_size ? share.batch_size : usual;
  TESSERA_CHECK(batch % ranks == 0,
                "bench scaling: --strong: {} ranks cannot share a batch of {} evenly; give a "
                "--batch-size that they divide",
                ranks, batch);
  share.batch_size = batch / ranks;
  return share;
}

}  // namespace

nlohmann::ordered_json measure_scaling(const RankOptions& o) {
  set_num_threads(1);
  Ref<ProcessGroup> group = init_process_group();
  DeviceScope on_device(o.device);
  WorkloadOptions sharded = share_of(o, group->size());
  Workload alone(sharded), together(sharded, group);
  std::optional<Workload> whole;  // what rank 0 trains on while the others wait; none: as all do
  if (o.strong && group->rank() == 0) whole.emplace(o.workload);
  sharded.fsdp = true;
  Workload in_shards(sharded, group);
  for (int i = 0; i < kWarmup; ++i) {
    alone.step(), together.step(), in_shards.step();
    if (whole) whole->step();
  }
  Workload& solo = whole ? *whole : alone;
  if (o.workload.compile)
    for (Workload* w : {&alone, &together, &in_shards, &solo}) w->check_replayed("scaling");
  int steps = o.steps;
  if (steps == 0)
    steps = agreed(*group, std::clamp<int64_t>(int64_t(500 / run_phase(alone, 1).ms), 1, 200));
  nlohmann::ordered_json result{{"scaling", o.strong ? "strong" : "weak"},
                                {"ranks", group->size()},
                                {"batch_size", together.batch_size()},
                                {"global_batch", together.batch_size() * group->size()},
                                {"parameters", alone.parameters()},
                                {"steps", steps},
                                {"cores", cores_of_ranks(*group)},
                                {"backend", group->backend(o.device)}};
  if (alone.tokens_per_step() > 0) result["seq_len"] = alone.seq_len();
  if (!o.device.is_cpu()) result.update(device_json(o.device));
  auto note = [&](const char* key, double ms) { result[key].push_back(ms); };
  for (int r = 0; r < o.rounds; ++r) {
    group->barrier(kPatience);
    if (group->rank() == 0) note("solo_ms", run_phase(solo, steps).ms);
    group->barrier(kPatience);
    Phase apart = run_phase(alone, steps);
    note("unconnected_ms", mean_over_ranks(*group, apart.ms));
    note("unconnected_processor_ms", mean_over_ranks(*group, apart.processor_ms));
    group->barrier(kPatience);
    note("lockstep_ms", mean_over_ranks(*group, run_phase(alone, steps, group.get()).ms));
    group->barrier(kPatience);
    Phase joined = run_phase(together, steps);
    note("ddp_ms", mean_over_ranks(*group, joined.ms));
    note("ddp_processor_ms", mean_over_ranks(*group, joined.processor_ms));
    group->barrier(kPatience);
    note("fsdp_ms", mean_over_ranks(*group, run_phase(in_shards, steps).ms));
  }
  destroy_process_group();
  return result;
}

}  // namespace tessera::bench
