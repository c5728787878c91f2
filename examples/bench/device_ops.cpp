// bench ops --device: what an op on 16 values costs the thread that enqueues it, and the device.
#include <fmt/core.h>

#include "core/base/error.h"
#include "core/dispatch/default_device.h"
#include "examples/bench/device.h"

namespace tessera::bench {

Json device_ops(const DeviceOptions& o, const std::string& only, int samples) {
  const Device device = device_for("ops", o);
  DeviceScope on_device(device);
  const DeviceTimer timer(device);
  const std::vector<Case> cases = small_cases();
  std::vector<std::string> names;
  for (const Case& c : cases) names.push_back(c.name);
  if (!only.empty()) check_only("ops", only, names);
  fmt::print("{}{}, {}\n", device_text(device),
             timer.has_clock() ? "device time by its clock"
                               : "no clock on the device: device time is until all is done",
             load_text());
  fmt::print("{:<32} {:>12} {:>10} {:>10} {:>14}\n", "16 values or 0-d, ns a call", "host", "q1",
             "q3", "device");
  Json rows = Json::array();
  for (const Case& c : cases) {
    if (c.name.find(only) == std::string::npos) continue;
    const DeviceTimer::Cost cost = timer.cost(c.prepare(), samples);
    fmt::print("{:<32} {:>12.1f} {:>10.1f} {:>10.1f} {:>14.1f}\n", c.name, cost.host.median * 1e9,
               cost.host.q1 * 1e9, cost.host.q3 * 1e9, cost.device.median * 1e9);
    rows.push_back({{"name", c.name},
                    {"host_ns", to_json(cost.host, 1e9)},
                    {"device_ns", to_json(cost.device, 1e9)}});
  }
  fmt::print(
      "host: until a call is enqueued (item waits for the value); device: from the first call's\n"
      "begin to the last one's end, so at least the host's where that is slower\n");
  Json j = device_json(device);
  j["clock"] = timer.has_clock() ? "device" : "host";
  j["ops"] = rows;
  return j;
}

}  // namespace tessera::bench
