// Puts the work of a device into a profile. What the calling thread enqueues on a stream while a
// span lives becomes one event in a lane of the device, which begins and ends when that work does,
// with a sample of the memory that is then held. Where the thread records no profile nothing
// happens; a device without a clock has samples of memory only. Invariant: nothing here waits,
// except for the first event of a device in a profile, which waits for the stream of kernels; times
// are read when somebody asks for the profile's events.
#pragma once
#include <functional>
#include <memory>
#include <string_view>

#include "core/base/profile.h"
#include "core/tensor/event.h"
#include "core/tensor/stream.h"

namespace tessera {

class DeviceSpan {
 public:
  /// Spans within another one are part of that.
  DeviceSpan(std::string_view name, const Stream& stream) {
    if (current_profile() && !stream.device.is_cpu()) [[unlikely]]
      begin(name, stream);
  }
  ~DeviceSpan() {
    if (open_) [[unlikely]]
      end();
  }
  DeviceSpan(const DeviceSpan&) = delete;
  DeviceSpan& operator=(const DeviceSpan&) = delete;

 private:
  struct Open;
  void begin(std::string_view name, const Stream& stream);
  void end() noexcept;

  Open* open_ = nullptr;
};

/// Adds `event`, without times, to a profile: it began and ended with these two of record_timed().
using AddDeviceTimes = std::function<void(ProfileEvent event, Ref<Event> from, Ref<Event> to)>;
/// For work of `device` on a stream that is not the calling thread's own, such as a group's: adds
/// to this thread's profile, from any thread. Null where there is none, or the device has no clock.
AddDeviceTimes device_times(Device device);

/// Adds a sample of the memory that is held on `device` to this thread's profile, if it has one and
/// the last sample was another.
void profile_memory(Device device);

}  // namespace tessera
