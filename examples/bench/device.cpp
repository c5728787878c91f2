#include "examples/bench/device.h"

#include <fmt/core.h>

#include <algorithm>

#include "collectives/store/environment.h"
#include "core/base/error.h"

namespace tessera::bench {
namespace {

constexpr double kSampleSeconds = 2e-3;
constexpr int64_t kMostKib = int64_t(1) << 30, kMostEdge = 1 << 16;

}  // namespace

void add_device_options(Subcommand& sub, DeviceOptions& o, bool sized) {
  sub.option("--device", o.device, "cpu, or a device as train has it: cuda, cuda:1");
  if (!sized) return;
  sub.option("--kib", o.kib, "size of the largest operand on a device");
  sub.option("--edge", o.edge, "of square matrices on a device");
}

Device device_for(const std::string& command, const DeviceOptions& o, int rank) {
  Device device = parse_device(o.device);
  const std::string what = "bench " + command;
  TESSERA_CHECK(!device.is_meta(), "{}: --device meta has no values to measure", what);
  check_device(device, what);
  const DeviceOptions usual;
  TESSERA_CHECK(
      !device.is_cpu() || (o.kib == usual.kib && o.edge == usual.edge),
      "{}: --kib and --edge are for --device of another kind; the CPU's sizes follow from "
      "its caches",
      what);
  TESSERA_CHECK(o.kib >= 1 && o.kib <= kMostKib, "{}: --kib {}: expected 1 to {}", what, o.kib,
                kMostKib);
  TESSERA_CHECK(o.edge >= 8 && o.edge <= kMostEdge, "{}: --edge {}: expected 8 to {}", what, o.edge,
                kMostEdge);
  if (!device.is_cpu() && o.device.find(':') == std::string::npos)
    device.index =
        int8_t((rank < 0 ? job_environment().local_rank : rank) % runtime_of(device).count());
  return device;
}

std::string device_text(Device device) {
  DeviceRuntime& runtime = runtime_of(device);
  std::string text = fmt::format("{}: {}\n", to_string(device), runtime.describe(device.index));
  if (const std::string why = runtime.why_times_mean_nothing(device.index); !why.empty())
    text += fmt::format("times mean nothing here: {}\n", why);
  return text;
}

Json device_json(Device device) {
  DeviceRuntime& runtime = runtime_of(device);
  Json j{{"device", to_string(device)}, {"description", runtime.describe(device.index)}};
  if (const std::string why = runtime.why_times_mean_nothing(device.index); !why.empty())
    j["times"] = "mean nothing: " + why;
  const std::string itself = fmt::format("{}:", runtime.name());  // "cuda:0: ..", a device's line
  for (const Finding& f : runtime.findings())
    if (!f.text.starts_with(itself)) j["libraries"].push_back(f.text);
  return j;
}

DeviceTimer::DeviceTimer(Device device)
    : device_(device),
      runtime_(runtime_of(device)),
      stream_(runtime_.stream(device.index)),
      has_clock_(bool(runtime_.record_timed(stream_))) {}

double DeviceTimer::seconds_of(const Batch& batch, int64_t calls, double* host) const {
  runtime_.synchronize(stream_);
  Ref<Event> from = has_clock_ ? runtime_.record_timed(stream_) : nullptr;
  Stopwatch watch;
  batch(calls);
  *host = watch.seconds();
  if (has_clock_) {
    Ref<Event> to = runtime_.record_timed(stream_);
    return runtime_.elapsed_ms(*from, *to) * 1e-3;
  }
  runtime_.synchronize(stream_);
  return watch.seconds();
}

DeviceTimer::Cost DeviceTimer::cost(const Batch& batch, int samples, int64_t most_calls) const {
  double host = 0;
  seconds_of(batch, 1, &host);  // compiles, allocates
  const double once = std::max(seconds_of(batch, 1, &host), 1e-9);
  const int64_t calls = std::clamp(int64_t(kSampleSeconds / once), int64_t(1), most_calls);
  std::vector<double> on_device, on_host;
  for (int s = 0; s < samples; ++s) {
    on_device.push_back(seconds_of(batch, calls, &host) / double(calls));
    on_host.push_back(host / double(calls));
  }
  return {stats_of(on_device), stats_of(on_host)};
}

Stats DeviceTimer::in_a_row(FunctionRef<void()> enqueue, int calls) const {
  std::vector<double> seconds;
  if (!has_clock_) {
    double host = 0;
    const auto once = [&](int64_t) { enqueue(); };
    for (int i = 0; i < calls; ++i) seconds.push_back(seconds_of(once, 1, &host));
    return stats_of(seconds);
  }
  runtime_.synchronize(stream_);
  std::vector<Ref<Event>> marks{runtime_.record_timed(stream_)};
  for (int i = 0; i < calls; ++i) {
    enqueue();
    marks.push_back(runtime_.record_timed(stream_));
  }
  for (size_t i = 1; i < marks.size(); ++i)
    seconds.push_back(runtime_.elapsed_ms(*marks[i - 1], *marks[i]) * 1e-3);
  return stats_of(seconds);
}

double Ceilings::product(DType t) const {
  for (const auto& [dtype, rate] : products)
    if (dtype == t) return rate;
  return 0;
}

Json ceilings_json(const Ceilings& c) {
  Json rows = Json::array();
  for (const Rate& r : c.rates)
    rows.push_back({{"what", r.what},
                    {"unit", r.arithmetic ? "TFLOP/s" : "GB/s"},
                    {"rate", r.per_second * (r.arithmetic ? 1e-12 : 1e-9)}});
  return rows;
}

}  // namespace tessera::bench
