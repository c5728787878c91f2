// bench ops: the cost of dispatch in ns, and the rate of kernels as a share of the core's peak
// arithmetic or memory bandwidth.
#include <fmt/core.h>

#include "collectives/decorators/counting.h"
#include "collectives/loopback/run_ranks.h"
#include "core/base/error.h"
#include "core/base/parallel.h"
#include "examples/bench/cases.h"
#include "examples/bench/commands.h"
#include "examples/bench/device.h"
#include "examples/bench/peaks.h"

namespace tessera::bench {
namespace {

struct OpsOptions {
  std::string only;  // part of a name
  int samples = 15, cpu = -1;
};

Json case_json(const Case& c, const Stats& t) {
  Json j{{"name", c.name}, {"ns", to_json(t, 1e9)}};
  if (c.flops > 0) j["gflops"] = c.flops / t.median * 1e-9;
  if (c.bytes > 0) j["gbytes_per_s"] = c.bytes / t.median * 1e-9;
  return j;
}

// Calls `f` on rank 0 of meshes of one and of two ranks, which are threads.
template <class F>
void on_each_mesh(F f) {
  using Axes = std::vector<MeshAxis>;
  for (const Axes& axes : {Axes{{"dp", 1}}, Axes{{"dp", 1}, {"tp", 1}}, Axes{{"dp", 2}}}) {
    run_ranks(axes[0].size, [&](ProcessGroup& world) {
      auto counted = make_ref<CountingGroup>(Ref<ProcessGroup>(&world));
      DeviceMesh mesh = init_device_mesh(axes, counted);
      if (world.rank() == 0) f(mesh, *counted);
    });
  }
}

std::vector<std::string> names_of_cases() {
  std::vector<std::string> names;
  auto add = [&](const std::vector<Case>& cases) {
    for (const Case& c : cases) names.push_back(c.name);
  };
  add(small_cases()), add(throughput_cases()), add(matmul_cases());
  on_each_mesh([&](const DeviceMesh& mesh, const CountingGroup&) { add(sharded_cases(mesh)); });
  return names;
}

class Printer {
 public:
  explicit Printer(const OpsOptions& o) : o_(o) {}

  void small(const std::vector<Case>& cases) {
    fmt::print("{:<44} {:>10} {:>10} {:>10}\n", "dispatch, 16 values or 0-d", "median ns", "q1",
               "q3");
    lines(cases);
  }
  void lines(const std::vector<Case>& cases) {
    each(cases, [](const Case& c, const Stats& t) {
      fmt::print("{:<44} {:>10.1f} {:>10.1f} {:>10.1f}\n", c.name, t.median * 1e9, t.q1 * 1e9,
                 t.q3 * 1e9);
      return Json::object();
    });
  }
  void sharded() {
    fmt::print("\n{:<44} {:>10} {:>10} {:>10}\n", "dispatch, sharded", "median ns", "q1", "q3");
    int64_t collectives = 0;
    on_each_mesh([&](const DeviceMesh& mesh, const CountingGroup& counted) {
      const int64_t before = counted.counts().total_calls();
      lines(sharded_cases(mesh));
      collectives += counted.counts().total_calls() - before;
    });
    fmt::print("{:<44} {:>10}\n", "collectives", collectives);
  }
  void throughput(const std::vector<Case>& cases, double memory_peak) {
    fmt::print("\n{:<44} {:>10} {:>10} {:>20}\n", "memory", "median", "GB/s", "share of DRAM copy");
    each(cases, [&](const Case& c, const Stats& t) {
      double rate = c.bytes / t.median;
      fmt::print("{:<44} {:>10} {:>10.1f} {:>19.0f}%\n", c.name, time_text(t.median), rate * 1e-9,
                 rate / memory_peak * 100);
      return Json{{"share_of_dram_copy", rate / memory_peak}};
    });
  }
  void arithmetic(const std::vector<Case>& cases, double peak) {
    fmt::print("\n{:<44} {:>10} {:>10} {:>20}\n", "contractions", "median", "GF/s",
               "share of fp32 peak");
    each(cases, [&](const Case& c, const Stats& t) {
      double rate = c.flops / t.median;
      fmt::print("{:<44} {:>10} {:>10.1f} {:>19.0f}%\n", c.name, time_text(t.median), rate * 1e-9,
                 rate / peak * 100);
      return Json{{"share_of_peak", rate / peak}};
    });
  }
  Json rows;

 private:
  template <class Line>
  void each(const std::vector<Case>& cases, Line line) {
    for (const Case& c : cases) {
      if (c.name.find(o_.only) == std::string::npos) continue;
      Stats t = time_batches(c.prepare(), o_.samples, 0.005);
      Json j = case_json(c, t);
      j.update(line(c, t));
      rows.push_back(j);
    }
  }
  const OpsOptions& o_;
};

void check_samples(int samples) {
  TESSERA_CHECK(samples >= kSamples, "bench ops: --samples {}: a median takes at least {}", samples,
                kSamples);
}

Json bench_ops(const OpsOptions& o) {
  bind_to_core(o.cpu);
  set_num_threads(1);
  if (!o.only.empty()) check_only("ops", o.only, names_of_cases());
  double fma = measure_fma_peak();
  int64_t dram = memory_levels(1).back().use;
  double memory = std::max(measure_bandwidth(Traffic::kCopy, dram),
                           measure_bandwidth(Traffic::kStreamingCopy, dram));
  fmt::print(
      "one thread bound to a core, {}; measured peaks: fp32 {:.1f} GF/s, DRAM copy {:.1f} GB/s "
      "(read + written)\n\n",
      load_text(), fma * 1e-9, memory * 1e-9);
  Printer printer(o);
  printer.small(small_cases());
  printer.sharded();
  printer.throughput(throughput_cases(), memory);
  printer.arithmetic(matmul_cases(), fma);
  return {{"peak_gflops", fma * 1e-9},
          {"dram_copy_gbytes_per_s", memory * 1e-9},
          {"ops", printer.rows}};
}

}  // namespace

void add_ops(CLI::App& app, Run& run) {
  auto o = std::make_shared<OpsOptions>();
  Subcommand sub(app, "ops", "ns of dispatch, rates of kernels as a share of the measured peaks");
  sub.option("--only", o->only, "cases whose name has this text");
  sub.option("--samples", o->samples, "behind each median");
  sub.option("--cpu", o->cpu, "core to bind to; -1: the last");
  sub.clock_option();
  auto device = std::make_shared<DeviceOptions>();
  add_device_options(sub, *device, false);
  sub.runs(run, [o, device] {
    check_samples(o->samples);
    return device_for("ops", *device).is_cpu() ? bench_ops(*o)
                                               : device_ops(*device, o->only, o->samples);
  });
}

}  // namespace tessera::bench
