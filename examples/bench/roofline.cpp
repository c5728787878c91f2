// bench roofline: the peaks of one core and of all cores at once, or of a device
// (device_roofline.cpp).
#include <fmt/core.h>

#include <atomic>
#include <thread>

#include "core/base/isa.h"
#include "examples/bench/commands.h"
#include "examples/bench/device.h"
#include "examples/bench/peaks.h"

namespace tessera::bench {
namespace {

// The sum over all cores when each runs `measure` on a thread bound to it, all at the same time.
double on_all_cores(const std::vector<int>& cores, const std::function<double()>& measure) {
  std::vector<double> rates(cores.size());
  std::atomic<size_t> ready = 0;
  std::vector<std::thread> threads;
  for (size_t i = 0; i < cores.size(); ++i)
    threads.emplace_back([&, i] {
      bind_to_core(cores[i]);
      ++ready;
      while (ready < cores.size()) std::this_thread::yield();
      rates[i] = measure();
    });
  double sum = 0;
  for (size_t i = 0; i < cores.size(); ++i) threads[i].join(), sum += rates[i];
  return sum;
}

Json bench_roofline(int cpu) {
  std::vector<int> cores = allowed_cores();
  int core = bind_to_core(cpu);
  fmt::print("{}, instruction set {}, core {} of {}, {}; best of 15 short runs\n", cpu_name(),
             cpu::isa_name(cpu::current_isa()), core, cores.size(), load_text());
  fmt::print("{:<26} {:>12} {:>12}\n", "", "one core", fmt::format("{} cores", cores.size()));
  Json rows;
  auto row = [&](const std::string& name, const char* unit, const std::function<double()>& one,
                 const std::function<double()>& each) {
    double single = one() * 1e-9;
    if (single == 0) return;
    double all = on_all_cores(cores, each) * 1e-9;
    fmt::print("{:<26} {:>12.1f} {:>12.1f} {}\n", name, single, all, unit);
    rows.push_back({{"what", name}, {"unit", unit}, {"one_core", single}, {"all_cores", all}});
  };
  row("fp32 multiply-add", "GF/s", measure_fma_peak, measure_fma_peak);
  row("bf16 dot, f32 sum", "GF/s", measure_bf16_peak, measure_bf16_peak);
  std::vector<Level> alone = memory_levels(1), shared = memory_levels(int(cores.size()));
  auto traffic_row = [&](const std::string& what, Traffic traffic, size_t level) {
    int64_t mine = alone[level].use, each = shared[level].use;
    row(
        fmt::format("{} {} ({})", alone[level].name, what, bytes_text(mine)), "GB/s",
        [=] { return measure_bandwidth(traffic, mine); },
        [=] { return measure_bandwidth(traffic, each); });
  };
  for (size_t l = 0; l < alone.size(); ++l)
    traffic_row("read", Traffic::kRead, l), traffic_row("copy", Traffic::kCopy, l);
  traffic_row("streaming copy", Traffic::kStreamingCopy, alone.size() - 1);
  fmt::print("copies count bytes read plus bytes written\n");
  return rows;
}

}  // namespace

void add_roofline(CLI::App& app, Run& run) {
  auto cpu = std::make_shared<int>(-1);
  Subcommand sub(
      app, "roofline",
      "peaks of this machine: arithmetic, caches, memory; one core and all, or a device");
  sub.option("--cpu", *cpu, "core of the one-core column; -1: the last");
  sub.clock_option();
  auto device = std::make_shared<DeviceOptions>();
  add_device_options(sub, *device, true);
  sub.runs(run, [cpu, device] {
    return device_for("roofline", *device).is_cpu() ? bench_roofline(*cpu)
                                                    : device_roofline(*device);
  });
}

}  // namespace tessera::bench
