#include "core/dispatch/device_span.h"

#include <algorithm>
#include <map>
#include <vector>

#include "core/base/error.h"
#include "core/base/log.h"
#include "core/tensor/device_runtime.h"

namespace tessera {
namespace {

/// A stream in a profile. The clock of a device has a zero of its own, so one event of the stream
/// is timed by both clocks: the device has then nothing else to do.
struct Lane {
  Stream stream;
  std::string name;
  Ref<Event> zero;     // null: the device has no clock
  double zero_us = 0;  // on the profile's clock
};

struct Lanes {
  uint64_t profile = 0;  // its number: they do not keep it alive
  std::vector<std::shared_ptr<const Lane>> lanes;
  std::map<std::string, int64_t> held;  // the last samples
};

Lanes& lanes_of_thread() {
  thread_local Lanes lanes;
  const uint64_t now = current_profile()->number();
  if (lanes.profile != now) lanes = {now, {}, {}};
  return lanes;
}

std::shared_ptr<const Lane> lane_of(const Stream& stream) {
  std::vector<std::shared_ptr<const Lane>>& all = lanes_of_thread().lanes;
  for (const auto& lane : all)
    if (lane->stream == stream) return lane;
  DeviceRuntime& runtime = runtime_of(stream.device);
  Lane lane{stream, to_string(stream.device), nullptr};
  const auto others = std::ranges::count_if(
      all, [&](const auto& other) { return other->stream.device == stream.device; });
  if (others > 0) lane.name += fmt::format(", stream {}", others + 1);
  runtime.synchronize(stream);
  lane.zero = runtime.record_timed(stream);
  if (lane.zero) {
    lane.zero->wait();
    lane.zero_us = current_profile()->now_us();
  }
  all.push_back(std::make_shared<const Lane>(std::move(lane)));
  return all.back();
}

constinit thread_local bool inside = false;

}  // namespace

struct DeviceSpan::Open {
  Ref<Profile> profile;
  std::shared_ptr<const Lane> lane;
  std::string name;
  Ref<Event> from;
};

void DeviceSpan::begin(std::string_view name, const Stream& stream) {
  if (inside) return;
  std::shared_ptr<const Lane> lane = lane_of(stream);
  Ref<Event> from = lane->zero ? runtime_of(stream.device).record_timed(stream) : nullptr;
  open_ = new Open{Ref<Profile>(current_profile()), std::move(lane), std::string(name),
                   std::move(from)};
  inside = true;
}

// The op may be unwinding because the device failed; that is thrown elsewhere.
void DeviceSpan::end() noexcept {
  inside = false;
  std::unique_ptr<Open> open(std::exchange(open_, nullptr));
  try {
    const Stream stream = open->lane->stream;
    if (open->from)
      open->profile->add_later([lane = open->lane, name = open->name, from = open->from,
                                to = runtime_of(stream.device).record_timed(stream)] {
        DeviceRuntime& runtime = runtime_of(lane->stream.device);
        ProfileEvent e{.name = name, .category = "device", .lane = lane->name};
        e.begin_us = lane->zero_us + runtime.elapsed_ms(*lane->zero, *from) * 1e3;
        e.took_us = e.own_us = runtime.elapsed_ms(*from, *to) * 1e3;
        return e;
      });
    if (open->profile.get() == current_profile()) profile_memory(stream.device);
  } catch (const std::exception& e) {
    logging::debug("profile: {} is left out: {}", open->name, e.what());
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
