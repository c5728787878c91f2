// bench collectives: every verb over a range of sizes, on the ranks of this job or on threads of
// this process. Before each call every rank writes all that it gives, as a backward pass would, so
// that no data is in the caches of the rank that reads it. A barrier follows, so that a late rank
// is not counted as slow transport. Only the call is timed, on every rank. The result is the mean
// over ranks, since the rank that leaves the barrier first waits in the call for the others. On
// cards, as nccl-tests does it, calls follow each other after the barrier, nobody waits before the
// last, and the time is divided by their number. "vote" is what the ranks of a compiled step agree
// on before each run whose collectives NCCL moves; it is on the host, and timed alone.
#include <fmt/core.h>

#include <algorithm>

#include "collectives/decorators/decorator.h"
#include "collectives/loopback/run_ranks.h"
#include "collectives/process_group.h"
#include "collectives/store/environment.h"
#include "compile/run/step_ranks.h"
#include "core/base/error.h"
#include "core/base/parallel.h"
#include "core/dispatch/default_device.h"
#include "core/ops/create.h"
#include "core/ops/update.h"
#include "examples/bench/commands.h"
#include "examples/bench/device.h"

namespace tessera::bench {
namespace {

struct CollectiveOptions {
  int ranks = 2;  // as threads; under tlaunch the job's
  DeviceOptions device;
  std::string backend;
  std::string only;
  int64_t min_bytes = 4 << 10, max_bytes = 100 << 20;
  double seconds = 0.2;  // for each verb and size
};

// One verb with its tensors; `bytes` is the size of the largest tensor of a rank, as in nccl-tests.
struct Verb {
  std::string name;
  Tensors gives;  // what this rank writes before each call
  std::function<void()> call;
  double bus_factor;  // share of `bytes` that has to cross between ranks
};

/// The verbs on tensors of the default device.
std::vector<Verb> verbs(ProcessGroup& g, int64_t bytes) {
  int64_t n = g.size(), whole = bytes / 4 / n * n, part = whole / n;
  Tensor t = ones({whole}), in = ones({whole}), out = ones({whole}), piece = ones({part});
  const Device device = t.device();
  Tensor shared(Meta::contiguous({whole}, kF32, device), g.allocate(size_t(whole) * 4, device));
  assign_(shared, t);
  double others = double(n - 1) / double(n);
  bool root = g.rank() == 0;
  auto at_root = [root](const Tensor& x) { return root ? Tensors{x} : Tensors{}; };
  std::vector<Verb> v = {
      {"all_reduce", {t}, [&g, t] { g.all_reduce(t, ReduceOp::kAvg); }, 2 * others},
      // The tensor is in the group's own memory, as gradient buckets are: nothing is copied in.
      {"all_reduce bucket",
       {shared},
       [&g, shared] { g.all_reduce(shared, ReduceOp::kAvg); },
       2 * others},
      {"reduce", {t}, [&g, t] { g.reduce(t, 0, ReduceOp::kAvg); }, 1},
      {"broadcast", at_root(t), [&g, t] { g.broadcast(t, 0); }, 1},
      {"all_gather", {piece}, [&g, out, piece] { g.all_gather(out, piece); }, others},
      {"gather", {piece}, [&g, piece, o = at_root(out)] { g.gather(o, piece, 0); }, others},
      {"scatter", at_root(in), [&g, piece, i = at_root(in)] { g.scatter(piece, i, 0); }, others},
      {"reduce_scatter", {in}, [&g, in, piece] { g.reduce_scatter(piece, in); }, others},
      {"all_to_all", {in}, [&g, in, out] { g.all_to_all(out, in); }, others}};
  if (n > 1)
    v.push_back({"send_recv", at_root(t),
                 [&g, t] {
                   if (g.rank() == 0) g.send(t, 1);
                   if (g.rank() == 1) g.recv(t, 0);
                 },
                 1});
  return v;
}

// A group that says that NCCL moves its tensors, so that ranks without cards vote too.
class SaysNccl final : public Decorator {
 public:
  using Decorator::Decorator;
  std::string_view backend(Device) const override { return "nccl"; }

 private:
  Ref<ProcessGroup> decorate(Ref<ProcessGroup> group) override {
    return make_ref<SaysNccl>(std::move(group));
  }
};

// The vote before a run of a compiled step whose collectives are all of one group.
Verb vote(ProcessGroup& g) {
  const auto ranks = std::make_shared<compiler::StepRanks>("bench");
  const std::vector<compiler::GroupCalls> calls{
      {make_ref<SaysNccl>(Ref<ProcessGroup>(&g)), kCPU, 1}};
  const compiler::RunState run{.stage = compiler::RunState::kByGraphs};
  return {"vote", {}, [ranks, calls, run] { ranks->agree(calls, run); }, 0};
}

// Rank 0 decides how many calls fill the time, so that all ranks make the same number.
int64_t agreed_calls(ProcessGroup& g, double seconds, double once, int64_t least, int64_t most) {
  Tensor calls = from_values<int64_t>({int64_t(seconds / std::max(once, 1e-7))}, {1});
  g.broadcast(calls, 0);
  return std::clamp<int64_t>(calls.item<int64_t>(), least, most);
}

Stats mean_over_ranks(ProcessGroup& g, const std::vector<double>& times) {
  const int64_t n = int64_t(times.size());
  Tensor mean = from_values<double>(times, {n});
  g.all_reduce(mean, ReduceOp::kAvg);
  return stats_of({mean.data<double>(), mean.data<double>() + n});
}

Stats time_verb(ProcessGroup& g, const Verb& v, double seconds) {
  constexpr int kMost = 50000;
  auto timed = [&] {
    for (const Tensor& t : v.gives) std::fill_n(t.data<float>(), t.numel(), 1.0f);
    g.barrier();
    Stopwatch w;
    v.call();
    return w.seconds();
  };
  for (int i = 0; i < 2; ++i) timed();
  Stopwatch trial;
  timed();
  const int64_t n = agreed_calls(g, seconds, trial.seconds(), kSamples, kMost);
  std::vector<double> times;
  for (int64_t i = 0; i < n; ++i) times.push_back(timed());
  return mean_over_ranks(g, times);
}

Stats time_verb_on(Device device, ProcessGroup& g, const Verb& v, double seconds) {
  constexpr int kMost = 1000;  // calls of a sample
  DeviceRuntime& runtime = runtime_of(device);
  const Stream stream = runtime.stream(device.index);
  const auto timed = [&](int64_t calls) {
    runtime.synchronize(stream);
    g.barrier();
    Stopwatch w;
    for (int64_t i = 0; i < calls; ++i) v.call();
    g.flush();
    runtime.synchronize(stream);
    return w.seconds() / double(calls);
  };
  timed(1);
  const int64_t calls = agreed_calls(g, seconds / kSamples, timed(1), 1, kMost);
  std::vector<double> times;
  for (int i = 0; i < kSamples; ++i) times.push_back(timed(calls));
  return mean_over_ranks(g, times);
}

/// "shm"; on a device "nccl" or "shm, staged", once a collective has decided which.
std::string way_of(ProcessGroup& g, Device device) {
  if (device.is_cpu()) return std::string(g.backend());
  g.all_reduce(ones({1}));
  const std::string way(g.backend(device));
  return way == g.backend() ? way + ", staged" : way;
}

Json measure(ProcessGroup& g, const CollectiveOptions& o, Device device) {
  DeviceScope on_device(device);
  bool tell = g.rank() == 0;
  std::vector<std::string> names{"barrier", "vote"};
  for (const Verb& v : verbs(g, o.min_bytes)) names.push_back(v.name);
  check_only("collectives", o.only, names);
  Json rows;
  const std::string way = way_of(g, device);
  if (tell) {
    if (!device.is_cpu()) fmt::print("{}", device_text(device));
    fmt::print("{} ranks, backend {}, f32, {}; {}; mean over ranks\n", g.size(), way, load_text(),
               device.is_cpu()
                   ? "before each call all ranks write what they give, and a barrier; the "
                     "call alone"
                   : "calls one after the other, after a barrier");
    fmt::print("{:<18} {:>9} {:>12} {:>12} {:>12} {:>10} {:>10} {:>7}\n", "verb", "size", "p50",
               "q1", "q3", "GB/s", "bus GB/s", "calls");
  }
  auto row = [&](const Verb& v, int64_t bytes) {
    if (v.name.find(o.only) == std::string::npos) return;
    const bool by_card = !device.is_cpu() && v.name != "vote";
    Stats t = by_card ? time_verb_on(device, g, v, o.seconds) : time_verb(g, v, o.seconds);
    if (!tell) return;
    double rate = double(bytes) / t.median * 1e-9;
    fmt::print("{:<18} {:>9} {:>12} {:>12} {:>12} {:>10.2f} {:>10.2f} {:>7}\n", v.name,
               bytes_text(bytes), time_text(t.median), time_text(t.q1), time_text(t.q3), rate,
               rate * v.bus_factor, t.samples);
    std::fflush(stdout);
    rows.push_back({{"verb", v.name},
                    {"bytes", bytes},
                    {"us", to_json(t, 1e6)},
                    {"gbytes_per_s", rate},
                    {"bus_gbytes_per_s", rate * v.bus_factor}});
  };
  row({"barrier", {}, [&] { g.barrier(); }, 0}, 0);
  row(vote(g), 0);
  for (int64_t bytes = o.min_bytes;; bytes = std::min(bytes * 8, o.max_bytes)) {
    for (const Verb& v : verbs(g, bytes)) row(v, bytes);
    if (bytes == o.max_bytes) break;
  }
  if (tell)
    fmt::print(
        "size: largest tensor of a rank; bus GB/s: bytes that have to cross between ranks, as "
        "nccl-tests counts\n");
  Json result{{"ranks", g.size()}, {"backend", way}, {"dtype", "f32"}};
  if (!device.is_cpu()) result.update(device_json(device));
  result["rows"] = rows;
  return result;
}

Json bench_collectives(const CollectiveOptions& o) {
  TESSERA_CHECK(o.ranks >= 1 && o.ranks <= kMostThreads,
                "bench collectives: --ranks {}: expected 1 to {}", o.ranks, kMostThreads);
  TESSERA_CHECK(o.seconds >= 0, "bench collectives: --seconds {}: expected at least 0", o.seconds);
  TESSERA_CHECK(o.min_bytes >= 256 && o.min_bytes <= o.max_bytes,
                "bench collectives: --min-bytes {} --max-bytes {}: expected 256 or more, and the "
                "first at most the second",
                o.min_bytes, o.max_bytes);
  const Device device = device_for("collectives", o.device);
  if (job_environment().world_size > 1) {
    Ref<ProcessGroup> group = init_process_group({.backend = o.backend});
    Json result = measure(*group, o, device);
    destroy_process_group();
    return result;
  }
  Json result;
  std::vector<int> cores = allowed_cores();
  auto body = [&](ProcessGroup& g) {
    bind_to_core(cores[size_t(g.rank()) % cores.size()]);
    Json mine = measure(g, o, device_for("collectives", o.device, g.rank()));
    if (g.rank() == 0) result = std::move(mine);
  };
  run_ranks(o.ranks, body, {.backend = o.backend});
  return result;
}

}  // namespace

void add_collectives(CLI::App& app, Run& run) {
  auto o = std::make_shared<CollectiveOptions>();
  Subcommand sub(
      app, "collectives",
      "latency and bandwidth of every verb, on buffers written before each call; under tlaunch, or "
      "ranks as threads");
  sub.option("--ranks", o->ranks, "threads, when not under tlaunch");
  sub.option("--backend", o->backend,
             "under tlaunch shm or gloo, as threads loopback or gloo; default by host");
  add_device_options(sub, o->device, false);
  sub.option("--only", o->only, "verbs whose name has this text");
  sub.option("--min-bytes", o->min_bytes, "smallest size");
  sub.option("--max-bytes", o->max_bytes, "largest size");
  sub.option("--seconds", o->seconds, "for each verb and size, about");
  sub.runs(run, [o] { return bench_collectives(*o); });
}

}  // namespace tessera::bench
