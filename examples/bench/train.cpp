// bench train: a training step beside its bound. One run times, in turn, the step and the matrix
// products and convolutions that it executes as bare oneDNN calls (each of them once, in the step's
// order).
#include <fmt/core.h>

#include <algorithm>
#include <map>

#include "core/base/error.h"
#include "core/base/parallel.h"
#include "core/dispatch/target.h"
#include "core/tensor/allocator.h"
#include "examples/bench/commands.h"
#include "examples/bench/contractions.h"
#include "examples/bench/device.h"
#include "examples/bench/peaks.h"
#include "examples/bench/recorder.h"
#include "examples/bench/workload.h"

namespace tessera::bench {
namespace {

struct TrainOptions {
  WorkloadOptions workload;
  DeviceOptions device;
  int samples = 31;
  int warmup = 10;
  int threads = 1;
  int cpu = -1;
  bool profile_ops = false, detail = false, compile = false;
};

Contractions record_contractions(Workload& work) {
  RecordingBackend recorder;
  BackendScope use({.backend = &recorder});
  work.step();
  return recorder.contractions();
}

void print_times(const std::map<std::string, OpTime>& times, int steps) {
  std::vector<std::pair<std::string, OpTime>> rows(times.begin(), times.end());
  std::sort(rows.begin(), rows.end(),
            [](auto& a, auto& b) { return a.second.seconds > b.second.seconds; });
  double total = 0;
  for (auto& [name, t] : rows) total += t.seconds;
  fmt::print("{:>9} {:>6} {:>7}  {}\n", "ms/step", "share", "calls", "op");
  for (auto& [name, t] : rows)
    fmt::print("{:>9.3f} {:>5.1f}% {:>7.1f}  {}\n", t.seconds / steps * 1e3,
               t.seconds / total * 100, double(t.calls) / steps, name);
  fmt::print("{:>9.3f} {:>5.1f}% {:>7}  sum of all ops\n", total / steps * 1e3, 100.0, "");
}

Json profile(Workload& work, int steps, bool detail) {
  RecordingBackend recorder;
  Stopwatch watch;
  {
    BackendScope use({.backend = &recorder});
    for (int i = 0; i < steps; ++i) work.step();
  }
  double whole = watch.seconds();
  fmt::print(
      "\nper op, mean of {} recorded steps ({:.3f} ms a step with recording; times exclude nested "
      "ops):\n",
      steps, whole / steps * 1e3);
  print_times(detail ? recorder.detailed_times() : recorder.times(), steps);
  Json ops;
  for (auto& [name, t] : recorder.times())
    ops.push_back(
        {{"op", name}, {"calls", double(t.calls) / steps}, {"ms", t.seconds / steps * 1e3}});
  return ops;
}

std::unique_ptr<Workload> compiled_workload(const TrainOptions& o) {
  WorkloadOptions w = o.workload;
  w.compile = true;
  auto work = std::make_unique<Workload>(w);
  for (int i = 0; i < std::max(o.warmup, 5); ++i) work->step();
  work->check_replayed("train");
  return work;
}

Json bench_train(const TrainOptions& o) {
  TESSERA_CHECK(o.samples >= kSamples, "bench train: --samples {}: a median takes at least {}",
                o.samples, kSamples);
  TESSERA_CHECK(o.threads >= 1 && o.threads <= kMostThreads,
                "bench train: --threads {}: expected 1 to {}", o.threads, kMostThreads);
  TESSERA_CHECK(o.warmup >= 0, "bench train: --warmup {}: expected at least 0", o.warmup);
  if (!device_for("train", o.device).is_cpu()) {
    TESSERA_CHECK(o.threads == 1 && o.cpu == -1 && !o.profile_ops && !o.detail &&
                      clock_in_use() == Clock::kWall,
                  "bench train: --device {}: --threads, --cpu, --cpu-time, --profile-ops and "
                  "--detail are for the CPU",
                  o.device.device);
    return device_train({o.device, o.workload, o.samples, o.warmup, o.compile});
  }
  if (o.threads == 1) bind_to_core(o.cpu);
  set_num_threads(o.threads);
  Workload work(o.workload);
  for (int i = 0; i < o.warmup; ++i) work.step();
  const Contractions contractions = record_contractions(work);
  BareStep bare(contractions, false), dense(contractions, true);
  work.step();
  std::vector<std::function<void()>> rows = {[&] { work.step(); }, [&] { bare.run(); },
                                             [&] { dense.run(); }};
  std::unique_ptr<Workload> compiled = o.compile ? compiled_workload(o) : nullptr;
  if (compiled) rows.push_back([&] { compiled->step(); });

  int64_t system_before = cpu_memory_stats().system_calls;
  std::vector<Stats> t = time_in_turn(rows, o.samples);
  int64_t system_calls = cpu_memory_stats().system_calls - system_before;
  const bool bf16 = o.workload.precision == kBF16;
  double peak = o.threads > 1 ? 0 : bf16 ? measure_bf16_peak() : measure_fma_peak();

  const Stats &step = t[0], &sum = t[1], &sum_dense = t[2];
  double flops = bare.flops(), tokens = double(work.tokens_per_step());
  fmt::print("{}: {} parameters, batch {}, {} thread{}, {}\n", o.workload.model, work.parameters(),
             work.batch_size(), o.threads, o.threads == 1 ? " bound to a core" : "s", load_text());
  fmt::print("step            {:.3f} ms (quartiles {:.3f} to {:.3f}, {} samples)\n",
             step.median * 1e3, step.q1 * 1e3, step.q3 * 1e3, step.samples);
  if (tokens > 0) fmt::print("tokens/s        {:.0f}\n", tokens / step.median);
  fmt::print("samples/s       {:.1f}\n", double(work.batch_size()) / step.median);
  fmt::print(
      "contractions    {:.3f} ms as bare oneDNN, operands laid out as in the step ({} products, "
      "{} convolutions, {:.2f} GFLOP); {:.3f} ms with dense operands\n",
      sum.median * 1e3, contractions.products.size(), contractions.convolutions.size(),
      flops * 1e-9, sum_dense.median * 1e3);
  fmt::print("step / contractions  {:.3f}\n", step.median / sum.median);
  if (peak > 0)
    fmt::print(
        "share of peak   {:.1f} % of {:.1f} GF/s {} measured here; bare contractions {:.1f} %\n",
        flops / step.median / peak * 100, peak * 1e-9, bf16 ? "bf16" : "fp32",
        flops / sum.median / peak * 100);
  if (compiled)
    fmt::print(
        "compiled step   {:.3f} ms (quartiles {:.3f} to {:.3f}); eager / compiled {:.3f}, "
        "compiled / contractions {:.3f}; compiled in {:.3f} s\n",
        t[3].median * 1e3, t[3].q1 * 1e3, t[3].q3 * 1e3, step.median / t[3].median,
        t[3].median / sum.median, compiled->compile_report().compile_s);
  fmt::print("allocations     {} from the system in {} steps\n", system_calls, o.samples + 1);
  Json json{{"model", o.workload.model},
            {"precision", bf16 ? "bf16" : "fp32"},
            {"parameters", work.parameters()},
            {"batch_size", work.batch_size()},
            {"threads", o.threads},
            {"step_ms", to_json(step, 1e3)},
            {"contractions_ms", to_json(sum, 1e3)},
            {"dense_contractions_ms", to_json(sum_dense, 1e3)},
            {"step_over_contractions", step.median / sum.median},
            {"tokens_per_s", tokens / step.median},
            {"gflop", flops * 1e-9},
            {"system_calls", system_calls}};
  if (compiled)
    json["compiled_step_ms"] = to_json(t[3], 1e3),
    json["compile_s"] = compiled->compile_report().compile_s,
    json["compiled_over_contractions"] = t[3].median / sum.median;
  if (peak > 0)
    json["peak_gflops"] = peak * 1e-9, json["share_of_peak"] = flops / step.median / peak;
  if (o.profile_ops) {
    json["ops"] = profile(work, o.samples, o.detail);
    fmt::print("\nbare products, each repeated by itself:\n");
    bare.print_shapes();
  }
  return json;
}

}  // namespace

void add_workload_options(Subcommand& sub, WorkloadOptions& o) {
  std::map<int64_t, std::string> usual;  // models by their batch
  for (const models::ModelSpec& spec : models::registered_models()) {
    std::string& names = usual[spec.bench_batch_size];
    names += (names.empty() ? "" : ", ") + spec.name;
  }
  std::string batches;
  for (const auto& [size, names] : usual)
    batches += fmt::format("{}{} ({})", batches.empty() ? "" : ", ", size, names);
  sub.option("--model", o.model, models::model_names());
  sub.option("--batch-size", o.batch_size, "sequences or rows; 0: " + batches);
  sub.option(
      "--seq-len", o.seq_len,
      "tokens of a sequence; 0: the model's usual number, 128 for masked text, else its context");
  sub.option("--set", o.set, "key=value: a field of the model's options");
}

void add_train(CLI::App& app, Run& run) {
  auto o = std::make_shared<TrainOptions>();
  Subcommand sub(
      app, "train",
      "a training step: time, tokens/s, ratio to its bare contractions, share of the peak");
  add_workload_options(sub, o->workload);
  add_device_options(sub, o->device, false);
  sub.option("--edge", o->device.edge, "of the square products on a device whose rate is the peak");
  sub.option(
      "--precision",
      [o](const std::string& given) {
        o->workload.precision = given == "bf16" ? kBF16 : kF32;
        return given == "fp32" || given == "bf16" ? "" : "expected fp32 or bf16";
      },
      "fp32", "type of products and attention: fp32, or bf16 by autocast");
  sub.option("--samples", o->samples, "steps that are timed");
  sub.option("--warmup", o->warmup, "steps before");
  sub.option("--threads", o->threads, "threads of the step; one is bound to a core");
  sub.option("--cpu", o->cpu, "core to bind one thread to; -1: the last");
  sub.flag("--compile", o->compile, "time the compiled step beside the eager one");
  sub.flag("--profile-ops", o->profile_ops, "print the time of each op in a step");
  sub.flag("--detail", o->detail, "with --profile-ops: by attributes and shapes");
  sub.clock_option();
  sub.runs(run, [o] { return bench_train(*o); });
}

}  // namespace tessera::bench
