// bench serve (hidden): keeps the program alive and times one sample for each line that it reads,
// so that a driver can alternate it with another program A-B-A-B. The protocol is that of
// scripts/reference/bench_common.py. It starts with one JSON line with the names. "go NAME" then
// prints {"name", "ms"} and, for a training step, "gflop": its matrix products and convolutions
// except those that are skipped because a factor is zero. "free" releases what the last name holds,
// "peak" measures the peak of the core, or of a device the fastest product, and "quit" or the end
// of stdin ends the program. On a device a sample ends when that has done all. Invariant: at most
// one case holds memory.
#include <algorithm>
#include <iostream>
#include <map>
#include <sstream>

#include "core/base/isa.h"
#include "core/base/parallel.h"
#include "core/base/version.h"
#include "core/dispatch/default_device.h"
#include "core/dispatch/target.h"
#include "examples/bench/cases.h"
#include "examples/bench/commands.h"
#include "examples/bench/compared.h"
#include "examples/bench/contractions.h"
#include "examples/bench/device.h"
#include "examples/bench/peaks.h"
#include "examples/bench/recorder.h"
#include "examples/bench/workload.h"

namespace tessera::bench {
namespace {

constexpr int kStepsOnDevice = 10;  // of a sample

struct Sample {
  std::function<double()> milliseconds;
  double gflop = 0;  // 0: not counted
};

void wait_for(Device device) {
  if (!device.is_cpu()) runtime_of(device).synchronize(stream_of(device));
}

// The case's work, of which each batch ends when the default device has done it.
Batch prepared(const Case& c) {
  return [batch = c.prepare(), device = default_device()](int64_t calls) {
    batch(calls);
    wait_for(device);
  };
}

// The median of a few runs, each of as many calls as fill some milliseconds; null where there is no
// such case.
Sample sample_of_case(const std::vector<Case>& cases, const std::string& name) {
  for (const Case& c : cases)
    if (c.name == name)
      return {[batch = prepared(c)] { return time_batches(batch, 5, 0.01).median * 1e3; }};
  return {};
}

Sample sample_of_large(const Case& c) {
  Batch batch = prepared(c);
  batch(1);
  return {[batch] {
    Stopwatch w;
    batch(1);
    return w.seconds() * 1e3;
  }};
}

// The median of some training steps: "step" of gpt-nano, "gpt2" (one sequence of 512), "mlp",
// "bert" (BERT-base, 8 sequences of 128, the head at every position), "bert512" (2 of 512),
// "resnet50" (8 images of 224 x 224). "_bf16" and then "_compiled" may follow a name.
struct Steps {
  std::string model;
  int64_t batch_size, seq_len;  // 0: the model's own
  int count;
};
const std::map<std::string, Steps> kSteps = {
    {"step", {"gpt-nano", 0, 0, 10}},      {"gpt2", {"gpt2", 0, 512, 1}},
    {"mlp", {"mlp", 0, 0, 100}},           {"bert", {"bert-base", 8, 128, 1}},
    {"bert512", {"bert-base", 2, 512, 1}}, {"resnet50", {"resnet50", 8, 0, 1}}};

/// Removes `suffix` from the end of `name`; false where it is not there.
bool take_suffix(std::string& name, std::string_view suffix) {
  if (!name.ends_with(suffix)) return false;
  name.resize(name.size() - suffix.size());
  return true;
}

Contractions contractions_of(Workload& work) {
  RecordingBackend recorder;
  BackendScope use({.backend = &recorder});
  work.train();
  return recorder.contractions();
}

Sample sample_of_steps(const Steps& steps, DType precision, bool compile) {
  auto work = std::make_shared<Workload>(WorkloadOptions{.model = steps.model,
                                                         .batch_size = steps.batch_size,
                                                         .seq_len = steps.seq_len,
                                                         .compile = compile,
                                                         .precision = precision});
  const double gflop = contractions_of(*work).flops() * 1e-9;
  for (int i = 0; i < std::max(steps.count, 5); ++i) work->step();
  if (const Device device = default_device(); !device.is_cpu()) {
    auto sample = [work, timer = DeviceTimer(device)] {
      return timer.in_a_row([&] { work->enqueue(); }, kStepsOnDevice).median * 1e3;
    };
    return {sample, gflop};
  }
  auto sample = [work, count = steps.count] {
    std::vector<double> times;
    for (int i = 0; i < count; ++i) {
      Stopwatch w;
      work->step();
      times.push_back(w.seconds() * 1e3);
    }
    return stats_of(times).median;
  };
  return {sample, gflop};
}

// Times the products of a gpt-nano step as bare library calls.
Sample sample_of_contractions() {
  Workload work{WorkloadOptions{}};
  const Contractions contractions = contractions_of(work);
  auto bare = std::make_shared<BareStep>(contractions, false);
  bare->run();
  return {[bare] {
    Stopwatch w;
    bare->run();
    return w.seconds() * 1e3;
  }};
}

std::vector<std::string> all_names(Device device) {
  std::vector<std::string> names = {"cross_entropy", "adamw", "add",
                                    "add_grad",      "view",  "transpose"};
  if (device.is_cpu()) names.push_back("contractions");
  for (const auto& [model, steps] : kSteps)
    for (const char* precision : {"", "_bf16"})
      for (const char* compiled : {"", "_compiled"}) names.push_back(model + precision + compiled);
  for (const Case& c : compared_cases()) names.push_back(c.name);
  return names;
}

Sample make_sample(const std::string& name) {
  std::string model = name;
  bool compile = take_suffix(model, "_compiled"), low = take_suffix(model, "_bf16");
  auto steps = kSteps.find(model);
  if (steps != kSteps.end()) return sample_of_steps(steps->second, low ? kBF16 : kF32, compile);
  if (name == "contractions") return sample_of_contractions();
  if (name == "cross_entropy") return sample_of_large(cross_entropy_case(8192));
  if (name == "adamw") return sample_of_large(adamw_case());
  Sample sample = sample_of_case(small_cases(), name);
  return sample.milliseconds ? sample : sample_of_case(compared_cases(), name);
}

/// In GFLOP/s.
Json peaks_of(Device device, const DeviceOptions& o) {
  if (device.is_cpu())
    return {{"fp32", measure_fma_peak() * 1e-9}, {"bf16", measure_bf16_peak() * 1e-9}};
  const DeviceTimer timer(device);
  const auto best = [&](DType t) {
    double most = 0;
    for (const Rate& r : measure_products(timer, o.edge, t, kSamples))
      most = std::max(most, r.per_second);
    return most * 1e-9;
  };
  return {{"fp32", best(kF32)}, {"bf16", best(kBF16)}};
}

struct ServeOptions {
  DeviceOptions device;
  int cpu = -1;
};

Json serve(const ServeOptions& o) {
  const Device device = device_for("serve", o.device);
  TESSERA_CHECK(device.is_cpu() || (o.cpu == -1 && clock_in_use() == Clock::kWall),
                "bench serve: --device {}: --cpu and --cpu-time are for the CPU", o.device.device);
  DeviceScope on_device(device);
  Json settings = device.is_cpu() ? Json{{"cpu", bind_to_core(o.cpu)},
                                         {"threads", 1},
                                         {"isa", cpu::isa_name(cpu::current_isa())}}
                                  : device_json(device);
  set_num_threads(1);
  const std::vector<std::string> names = all_names(device);
  auto say = [](const Json& j) { std::cout << j.dump() << std::endl; };
  say({{"program", "tessera"},
       {"version", version()},
       {"names", names},
       {"settings", std::move(settings)}});
  std::string held;
  Sample sample;
  auto free = [&] {
    sample = {}, held.clear();
    runtime_of(device).release_cached_memory(device.index);
  };
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string verb, name, rest;
    words >> verb >> name >> rest;
    if (verb == "quit") break;
    if (verb == "free") {
      free();
      say({{"free", true}});
      continue;
    }
    if (verb == "peak") {
      say(peaks_of(device, o.device));
      continue;
    }
    if (verb != "go" || !rest.empty() ||
        std::find(names.begin(), names.end(), name) == names.end()) {
      say({{"error", line}});
      continue;
    }
    if (name != held) free(), sample = make_sample(name), held = name;
    Json answer{{"name", name}, {"ms", sample.milliseconds()}};
    if (sample.gflop > 0) answer["gflop"] = sample.gflop;
    say(answer);
  }
  return {};
}

}  // namespace

void add_serve(CLI::App& app, Run& run) {
  auto o = std::make_shared<ServeOptions>();
  Subcommand sub(app, "serve", "times on demand, for drivers that alternate programs");
  sub.hide();
  add_device_options(sub, o->device, false);
  sub.option("--edge", o->device.edge, "of the square products on a device that are its peak");
  sub.option("--cpu", o->cpu, "core to bind to; -1: the last");
  sub.clock_option();
  sub.runs(run, [o] { return serve(*o); });
}

}  // namespace tessera::bench
