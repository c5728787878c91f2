#include "core/dispatch/device_span.h"

#include <algorithm>
#include <map>
#include <vector>

#include "core/base/error.h"
#include "core/base/log.h"
#include "core/tensor/device_runtime.h"

namespace tessera {
namespace {

/// The clock of a device has a zero of its own, so one event is timed by both clocks: its stream
/// has then nothing else to do.
struct Zero {
  Device device;
  Ref<Event> event;  // null: the device has no clock
  double us = 0;     // on the profile's clock
};

struct Lanes {
  uint64_t profile = 0;                               // its number: they do not keep it alive
  std::vector<std::pair<Stream, std::string>> names;  // of streams
  std::vector<std::shared_ptr<const Zero>> zeros;
  std::map<std::string, int64_t> held;  // the last samples
};

Lanes& lanes_of_thread() {
  thread_local Lanes lanes;
  const uint64_t now = current_profile()->number();
  if (lanes.profile != now) lanes = {now, {}, {}, {}};
  return lanes;
}

std::shared_ptr<const Zero> zero_of(Device device) {
  std::vector<std::shared_ptr<const Zero>>& all = lanes_of_thread().zeros;
  for (const auto& zero : all)
    if (zero->device == device) return zero;
  DeviceRuntime& runtime = runtime_of(device);
  const Stream stream = stream_of(device);
  runtime.synchronize(stream);
  Zero zero{device, runtime.record_timed(stream)};
  if (zero.event) {
    zero.event->wait();
    zero.us = current_profile()->now_us();
  }
  all.push_back(std::make_shared<const Zero>(std::move(zero)));
  return all.back();
}

const std::string& lane_of(const Stream& stream) {
  auto& all = lanes_of_thread().names;
  for (const auto& [named, name] : all)
    if (named == stream) return name;
  std::string name = to_string(stream.device);
  const auto others = std::ranges::count_if(
      all, [&](const auto& other) { return other.first.device == stream.device; });
  if (others > 0) name += fmt::format(", stream {}", others + 1);
  return all.emplace_back(stream, std::move(name)).second;
}

constinit thread_local bool inside = false;

}  // namespace

AddDeviceTimes device_times(Device device) {
  if (!current_profile() || device.is_cpu()) return nullptr;
  std::shared_ptr<const Zero> zero = zero_of(device);
  if (!zero->event) return nullptr;
  return [profile = Ref<Profile>(current_profile()), zero = std::move(zero)](
             ProfileEvent event, Ref<Event> from, Ref<Event> to) {
    profile->add_later([=] {
      DeviceRuntime& runtime = runtime_of(zero->device);
      ProfileEvent e = event;
      e.begin_us = zero->us + runtime.elapsed_ms(*zero->event, *from) * 1e3;
      e.took_us = e.own_us = runtime.elapsed_ms(*from, *to) * 1e3;
      return e;
    });
  };
}

struct DeviceSpan::Open {
  Ref<Profile> profile;
  Stream stream;
  ProfileEvent event;
  AddDeviceTimes add;  // null: the device has no clock
  Ref<Event> from;
};

void DeviceSpan::begin(std::string_view name, const Stream& stream) {
  if (inside) return;
  AddDeviceTimes add = device_times(stream.device);
  Ref<Event> from = add ? runtime_of(stream.device).record_timed(stream) : nullptr;
  open_ = new Open{Ref<Profile>(current_profile()),
                   stream,
                   {.name = std::string(name), .category = "device", .lane = lane_of(stream)},
                   std::move(add),
                   std::move(from)};
  inside = true;
}

// The op may be unwinding because the device failed; that is thrown elsewhere.
void DeviceSpan::end() noexcept {
  inside = false;
  std::unique_ptr<Open> open(std::exchange(open_, nullptr));
  try {
    if (open->add)
      open->add(open->event, open->from,
                runtime_of(open->stream.device).record_timed(open->stream));
    if (open->profile.get() == current_profile()) profile_memory(open->stream.device);
  } catch (const std::exception& e) {
    logging::debug("profile: {} is left out: {}", open->event.name, e.what());
  }
}

void profile_memory(Device device) {
  Profile* profile = current_profile();
  if (!profile) return;
  const std::string lane = to_string(device);
  const int64_t held = memory_stats(device).live_bytes;
  auto [last, is_first] = lanes_of_thread().held.try_emplace(lane, held);
  if (!is_first && std::exchange(last->second, held) == held) return;
  profile->add({.name = "memory of " + lane,
                .category = "memory",
                .lane = lane,
                .begin_us = profile->now_us(),
                .bytes = held});
}

}  // namespace tessera
