// A profile lists what a program did and when: ops, compiled kernels, collectives, waits and named
// spans, as events of a thread. Each thread is recorded or not by itself (ranks may be threads);
// one that is not pays one load per event. Invariant: spans of a thread are nested, and the own
// time of a span is its time without that of the spans within. A profiler from outside the process
// (nsys, ncu) is told of the same spans as NVTX ranges (nvtx.h).
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/nvtx.h"
#include "core/base/ref.h"

namespace tessera {

struct ProfileEvent {
  std::string name;
  // A literal: op, kernel, device, collective, module, span, wait or memory. The event of a wait
  // for a collective is named "wait"; one of category device is what a device did; one of category
  // memory is a sample of what `lane` holds, at begin_us.
  std::string_view category;
  // "": the program; else what works beside it: a group of ranks, a stream of a device ("cuda:0",
  // "cuda:0, NCCL of world (cuda)").
  std::string lane = {};
  std::string detail = {};           // operands, the node of a graph
  double begin_us = 0, took_us = 0;  // begins since 1970, so that ranks of one host align
  double own_us = 0;                 // without the events recorded within
  int64_t bytes = 0;                 // that are held, of category memory; that a call moves
};

/// A list of events that any thread may add to.
class Profile final : public RefCounted {
 public:
  /// Events beyond the millionth are counted and dropped.
  void add(ProfileEvent event);
  /// Adds the event that `finish` returns, which events() calls once: it may wait for a device.
  void add_later(std::function<ProfileEvent()> finish);
  /// All events, in the order in which they were added but for those of add_later, which are last.
  /// Throws what a device failed with.
  std::vector<ProfileEvent> events() const;
  size_t dropped() const;
  /// The number of this profile: each profile of the process has another one.
  uint64_t number() const { return number_; }
  /// Microseconds since 1970, by the clock that events are timed with.
  double now_us() const;

 private:
  static uint64_t next_number();
  mutable std::mutex mutex_;
  mutable std::vector<ProfileEvent> events_;
  mutable std::vector<std::function<ProfileEvent()>> later_;
  size_t dropped_ = 0;
  const uint64_t number_ = next_number();
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  const double epoch_us_ =
      std::chrono::duration<double, std::micro>(std::chrono::system_clock::now().time_since_epoch())
          .count();
};

namespace detail {
inline constinit thread_local Profile* profile_of_thread = nullptr;
}
/// What this thread records into; null: nothing.
inline Profile* current_profile() { return detail::profile_of_thread; }

/// While it lives, records the thread that made it, and what that thread starts on other threads
/// (collectives). A thread has one at a time; a second is a UserError.
class Profiler {
 public:
  Profiler();
  ~Profiler();
  Profiler(const Profiler&) = delete;
  Profiler& operator=(const Profiler&) = delete;
  const Ref<Profile>& profile() const { return profile_; }

 private:
  Ref<Profile> profile_;
};

/// Part of the program: ProfileSpan span("data").
class ProfileSpan {
 public:
  explicit ProfileSpan(std::string_view name, std::string_view category = "span")
      : profile_(current_profile()) {
    if (profile_ || nvtx::is_on()) [[unlikely]]
      begin(name, category);
  }
  ~ProfileSpan() {
    if (open_) [[unlikely]]
      end();
  }
  ProfileSpan(const ProfileSpan&) = delete;
  ProfileSpan& operator=(const ProfileSpan&) = delete;
  /// True when it is recorded, and a detail would be seen.
  explicit operator bool() const { return profile_ != nullptr; }
  void set_detail(std::string text);

 private:
  struct Open;
  void begin(std::string_view name, std::string_view category);
  void end();

  Profile* profile_;
  Open* open_ = nullptr;
};

/// Events as JSON objects of the trace event format that chrome://tracing and Perfetto read, with
/// commas between them: process `rank`, one lane for the program and one for each other; what each
/// device holds as a counter.
std::string trace_events(std::span<const ProfileEvent> events, int rank);
/// The text of a file for those viewers; `ranks` has the trace_events of each rank.
std::string chrome_trace(std::span<const std::string> ranks);

/// What communication cost a thread.
struct CommunicationTime {
  double total_us = 0;    // of collectives, summed over groups
  double exposed_us = 0;  // that the thread waited for them
  /// Share of the communication that took place behind computation; 1 where there is none.
  double hidden() const;
};
CommunicationTime communication_of(std::span<const ProfileEvent> events);

/// The `rows` names of ops, kernels, work of devices, collectives and waits with the most time of
/// their own, as a table: calls, milliseconds, share of the program's time, microseconds per call.
std::string profile_table(std::span<const ProfileEvent> events, size_t rows = 20);

}  // namespace tessera
