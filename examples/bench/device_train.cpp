// bench train --device: training steps on a device, eager and compiled, beside what the device can
// do at most. A step's model FLOPs are those of the products and convolutions that it executes
// when it is not compiled, recorded: of a transformer 6 for each weight that is multiplied and each
// token, and 12 x layers x width x tokens for each token's attention. Their rate stands beside the
// fastest product of the dtype as measured in this run, and beside the peak that the vendor
// publishes.
#include <fmt/core.h>

#include <algorithm>

#include "core/dispatch/default_device.h"
#include "core/dispatch/target.h"
#include "examples/bench/contractions.h"
#include "examples/bench/device.h"
#include "examples/bench/published.h"
#include "examples/bench/recorder.h"

namespace tessera::bench {
namespace {

constexpr int kReplayed = 5;  // steps until a compiled one is replayed as one graph

/// What one way to run the step took.
struct Steps {
  Stats seconds;
  int64_t peak_bytes;
  double loss;       // of the last step
  double compile_s;  // 0: not compiled
};

struct Peaks {
  double measured;                  // FLOP/s
  std::optional<double> published;  // nothing: the card is not in the table
};

Peaks product_peaks(const DeviceTimer& timer, const DeviceTrainOptions& o) {
  const Device device = timer.device();
  double best = 0;
  for (const Rate& r : measure_products(timer, o.device.edge, o.workload.precision, kSamples))
    best = std::max(best, r.per_second);
  DeviceRuntime& runtime = runtime_of(device);
  runtime.release_cached_memory(device.index);
  return {best, published_product_peak(runtime.describe(device.index), o.workload.precision)};
}

double model_flops(Workload& work) {
  RecordingBackend recorder;
  BackendScope use({.backend = &recorder});
  work.step();
  return recorder.contractions().flops();
}

Steps time_steps(const DeviceTimer& timer, Workload& work, const DeviceTrainOptions& o,
                 bool compiled) {
  const Device device = timer.device();
  const int before = compiled ? std::max(o.warmup, kReplayed) : o.warmup;
  for (int i = 0; i < before; ++i) work.step();
  if (compiled) work.check_replayed("train");
  Tensor loss;
  return {.seconds = timer.in_a_row([&] { loss = work.enqueue(); }, o.samples),
          .peak_bytes = memory_stats(device).peak_bytes,
          .loss = loss.item<double>(),
          .compile_s = compiled ? work.compile_report().compile_s : 0};
}

class Report {
 public:
  Report(const DeviceTrainOptions& o, const DeviceTimer& timer, const Peaks& peaks)
      : o_(o), device_(timer.device()), peaks_(peaks), by_clock_(timer.has_clock()) {}

  void begin(const Workload& work, double flops) {
    flops_ = flops, batch_ = work.batch_size(), tokens_ = work.tokens_per_step();
    const std::string_view dtype = name_of(o_.workload.precision);
    const std::string each = tokens_ > 0 ? fmt::format(" of {} tokens", work.seq_len()) : "";
    fmt::print(
        "{}{}: {} parameters, batch {}{}, {}, one rank; {:.4g} GFLOP a step, "
        "{:.4g} MFLOP a {}\n",
        device_text(device_), o_.workload.model, work.parameters(), batch_, each, dtype,
        flops * 1e-9, flops * 1e-6 / double(tokens_ ? tokens_ : batch_),
        tokens_ ? "token" : "sample");
    fmt::print("products of {}: {:.4g} TFLOP/s measured ({}^3), {}\n", dtype,
               peaks_.measured * 1e-12, o_.device.edge,
               peaks_.published ? fmt::format("{:.1f} published", *peaks_.published * 1e-12)
                                : "none published that is known here");
    fmt::print("{:<9} {:>10} {:>22} {:>11} {:>11} {:>9} {:>9} {:>10} {:>9}\n", "", "ms a step",
               "quartiles", "samples/s", "tokens/s", "TFLOP/s", "measured", "published", "MB");
    json_ = device_json(device_);
    json_.update({{"clock", by_clock_ ? "device" : "host"},
                  {"model", o_.workload.model},
                  {"dtype", dtype},
                  {"parameters", work.parameters()},
                  {"ranks", 1},
                  {"local_batch", batch_},
                  {"global_batch", batch_}});
    if (tokens_ > 0) json_["seq_len"] = work.seq_len();
    json_["model_flops"] = flops;
    json_["product_peak"] = {{"edge", o_.device.edge}, {"measured", peaks_.measured}};
    if (peaks_.published) json_["product_peak"]["published"] = *peaks_.published;
  }

  void add(const char* name, const Steps& s) {
    const double step = s.seconds.median, rate = flops_ / step;
    const auto share = [&](double peak) { return fmt::format("{:.1f} %", rate / peak * 100); };
    fmt::print("{:<9} {:>10.3f} {:>22} {:>11.1f} {:>11} {:>9.4g} {:>9} {:>10} {:>9.1f}{}\n", name,
               step * 1e3, fmt::format("{:.3f} to {:.3f}", s.seconds.q1 * 1e3, s.seconds.q3 * 1e3),
               double(batch_) / step, tokens_ ? fmt::format("{:.0f}", double(tokens_) / step) : "",
               rate * 1e-12, share(peaks_.measured),
               peaks_.published ? share(*peaks_.published) : "", double(s.peak_bytes) * 1e-6,
               s.compile_s > 0 ? fmt::format("  compiled in {:.3f} s", s.compile_s) : "");
    std::fflush(stdout);
    Json run{{"compiled", s.compile_s > 0},
             {"seconds", to_json(s.seconds)},
             {"samples_per_s", double(batch_) / step},
             {"model_flops_per_s", rate},
             {"share_of_measured_peak", rate / peaks_.measured}};
    if (tokens_ > 0) run["tokens_per_s"] = double(tokens_) / step;
    if (peaks_.published) run["share_of_published_peak"] = rate / *peaks_.published;
    if (s.compile_s > 0) run["compile_s"] = s.compile_s;
    run["peak_bytes"] = s.peak_bytes;
    run["loss"] = s.loss;
    json_["runs"][name] = std::move(run);
  }

  Json end() {
    fmt::print(
        "measured, published: the model's FLOP/s as a share of these peaks; MB: memory of the "
        "device at most\n");
    return std::move(json_);
  }

 private:
  const DeviceTrainOptions& o_;
  const Device device_;
  const Peaks peaks_;
  const bool by_clock_;
  double flops_ = 0;
  int64_t batch_ = 0, tokens_ = 0;
  Json json_;
};

}  // namespace

Json device_train(const DeviceTrainOptions& o) {
  const Device device = device_for("train", o.device);
  DeviceScope on_device(device);
  const DeviceTimer timer(device);
  DeviceRuntime& runtime = runtime_of(device);
  Report report(o, timer, product_peaks(timer, o));
  for (bool compiled : {false, true}) {
    if (compiled && !o.compile) break;
    WorkloadOptions workload = o.workload;
    workload.compile = compiled;
    runtime.reset_peak_memory(device.index);
    {
      Workload work(workload);
      if (!compiled) report.begin(work, model_flops(work));
      report.add(compiled ? "compiled" : "eager", time_steps(timer, work, o, compiled));
    }
    runtime.release_cached_memory(device.index);
  }
  return report.end();
}

}  // namespace tessera::bench
