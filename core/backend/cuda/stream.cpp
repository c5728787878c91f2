#include "core/backend/cuda/stream.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "core/backend/cuda/context.h"
#include "core/backend/cuda/library.h"
#include "core/base/error.h"
#include "core/tensor/allocator.h"
#include "core/tensor/wait_ended.h"

namespace tessera::cuda {
namespace {

/// Streams and events of a card that nobody uses at the moment.
struct Pool {
  std::mutex mutex;
  std::vector<StreamHandle> streams[2];  // by Priority
  std::vector<StreamHandle> capturing;   // nobody's home: other streams never wait for them
  std::vector<EventHandle> events[2];    // by Timing
  size_t made[2] = {};                   // of them
};

// A step that is enqueued while another runs has events of its own, and steps differ: events are
// made ahead, so that steps after the first two find what they need.
constexpr size_t kEventsAhead = 256;

// Never destroyed: threads and events give back what they hold until the process ends.
Pool& pool(int device) {
  static auto& pools = *new std::vector<Pool>(size_t(device_count()));
  return pools[size_t(device)];
}

template <class T>
T pop(std::vector<T>& from) {
  T last = from.back();
  from.pop_back();
  return last;
}

// One that nobody uses; null where all are in use.
StreamHandle take_idle(std::mutex& mutex, std::vector<StreamHandle>& from) {
  std::lock_guard lock(mutex);
  return from.empty() ? nullptr : pop(from);
}

template <class T>
void give(std::mutex& mutex, std::vector<T>& to, T value) {
  std::lock_guard lock(mutex);
  to.push_back(value);
}

Stream new_stream(int device, int priority) {
  CurrentDevice current(device);
  StreamHandle stream = nullptr;
  // Unlike the default stream's, their work overlaps with that of libraries on the default one.
  driver().stream_create(&stream, kStreamNonBlocking, priority);
  return {device_of(device), stream};
}

Stream take_stream(int device, SideStream::Priority priority) {
  Pool& p = pool(device);
  if (const StreamHandle kept = take_idle(p.mutex, p.streams[size_t(priority)]))
    return {device_of(device), kept};
  CurrentDevice current(device);
  int least = 0, greatest = 0;
  driver().stream_priority_range(&least, &greatest);
  return new_stream(device, priority == SideStream::Priority::kHigh ? greatest : least);
}

void give_stream(const Stream& stream, SideStream::Priority priority) {
  Pool& p = pool(stream.device.index);
  give(p.mutex, p.streams[size_t(priority)], handle_of(stream));
}

// Makes as many as there are where all are in use.
EventHandle take_event(Pool& p, StreamEvent::Timing timing) {
  std::lock_guard lock(p.mutex);
  auto& events = p.events[size_t(timing)];
  if (events.empty())
    for (size_t n = std::max(p.made[size_t(timing)], kEventsAhead); n-- > 0;) {
      EventHandle event = nullptr;
      driver().event_create(
          &event, timing == StreamEvent::Timing::kOn ? kEventDefault : kEventDisableTiming);
      events.push_back(event);
      ++p.made[size_t(timing)];
    }
  return pop(events);
}

/// The compute streams of a thread, by card.
struct ComputeStreams {
  std::vector<Stream> streams;
  ~ComputeStreams() {
    for (const Stream& s : streams)
      if (s.handle) give_stream(s, SideStream::Priority::kNormal);
  }
};

thread_local ComputeStreams own;

thread_local int64_t waits = 0;

}  // namespace

Stream compute_stream(int device) {
  if (size_t(device) < own.streams.size() && own.streams[size_t(device)].handle) [[likely]]
    return own.streams[size_t(device)];
  context_of(device);  // throws where there is no such card
  if (own.streams.size() <= size_t(device)) own.streams.resize(size_t(device) + 1);
  own.streams[size_t(device)] = take_stream(device, SideStream::Priority::kNormal);
  own_stream(own.streams[size_t(device)]);
  capture_stream(device);  // which is not to be made in the midst of training
  return own.streams[size_t(device)];
}

Stream copy_stream(int device, int turn) {
  thread_local std::map<std::pair<int, int>, std::unique_ptr<SideStream>> streams;
  auto& side = streams[{device, turn}];
  if (!side) side = std::make_unique<SideStream>(device);
  return side->stream();
}

namespace {

/// The calling thread's streams for what it captures, by card.
struct CaptureStreams {
  std::map<int, Stream> streams;
  ~CaptureStreams() {
    for (const auto& [device, s] : streams)
      give(pool(device).mutex, pool(device).capturing, handle_of(s));
  }
};

}  // namespace

Stream capture_stream(int device) {
  thread_local CaptureStreams own_ones;
  const auto [at, fresh] = own_ones.streams.try_emplace(device);
  if (fresh) {
    Pool& p = pool(device);
    const StreamHandle kept = take_idle(p.mutex, p.capturing);
    at->second = kept ? Stream{device_of(device), kept} : new_stream(device, 0);
  }
  return at->second;
}

Stream exchange_compute_stream(const Stream& stream) {
  const Stream before = compute_stream(stream.device.index);
  own.streams[size_t(stream.device.index)] = stream;
  return before;
}

SideStream::SideStream(int device, Priority priority)
    : stream_(take_stream(device, priority)), priority_(priority) {
  own_stream(stream_);
}
SideStream::~SideStream() { give_stream(stream_, priority_); }

StreamEvent::StreamEvent(const Stream& stream, Timing timing)
    : stream_(stream), timing_(timing), refusals_(refusals_of(stream)) {
  if (refusals_) thrown_ = refusals_->thrown();
  CurrentDevice current(stream.device.index);
  Pool& p = pool(stream.device.index);
  event_ = take_event(p, timing);
  driver().event_record(event_, handle_of(stream));
}

// The driver took note of waits for the event when they were enqueued, so it can be recorded anew.
StreamEvent::~StreamEvent() {
  Pool& p = pool(stream_.device.index);
  give(p.mutex, p.events[size_t(timing_)], event_);
}

void* StreamEvent::operator new(size_t bytes) { return pool_allocate(bytes); }
void StreamEvent::operator delete(void* p, size_t bytes) { pool_deallocate(p, bytes); }

bool StreamEvent::done() const {
  if (done_.load(std::memory_order_acquire)) return true;
  CurrentDevice current(stream_.device.index);  // threads that only wait have none
  const Result r = driver().event_query.result(event_);
  if (r == Result::kNotReady) return false;
  // After a failure nothing runs any more; wait() throws it.
  if (r == Result::kSuccess) done_.store(true, std::memory_order_release);
  return true;
}

void StreamEvent::wait() {
  if (!done_.load(std::memory_order_acquire)) {
    CurrentDevice current(stream_.device.index);
    note_host_wait();
    driver().event_synchronize(event_);
    done_.store(true, std::memory_order_release);
  }
  if (refusals_ && !waits_for_memory()) refusals_->raise(thrown_);
}

void StreamEvent::wait_on(const Stream& stream) {
  if (stream.device.kind != stream_.device.kind) return wait();
  if (stream == stream_ || done_.load(std::memory_order_acquire)) return;
  CurrentDevice current(stream.device.index);
  driver().stream_wait_event(handle_of(stream), event_, 0);
}

bool captures(const Stream& stream) {
  int status = kCaptureNone;
  driver().capture_status(handle_of(stream), &status);
  return status != kCaptureNone;
}

double elapsed_ms(StreamEvent& from, StreamEvent& to) {
  TESSERA_ASSERT(from.timing_ == StreamEvent::Timing::kOn && to.timing_ == from.timing_,
                 "cuda: events were recorded without timing");
  for (StreamEvent* e : {&from, &to})
    if (!e->done()) e->wait();
  float ms = 0;
  driver().event_elapsed(&ms, from.event_, to.event_);
  return ms;
}

void synchronize(const Stream& stream) {
  CurrentDevice current(stream.device.index);
  note_host_wait();
  driver().stream_synchronize(handle_of(stream));
  raise_refusals(stream);
}

int64_t events_made(int device) {
  context_of(device);  // throws where there is no such card
  Pool& p = pool(device);
  std::lock_guard lock(p.mutex);
  return int64_t(p.made[0] + p.made[1]);
}

int64_t host_waits() { return waits; }
void note_host_wait() { ++waits; }

}  // namespace tessera::cuda
