// Streams and events of a card. A thread has one compute stream on each card, on which its kernels
// run; copies and collectives that overlap with them have side streams. An event marks a place in a
// stream: host code waits for it where it needs values, another stream where it goes on from there.
// Invariant: streams and the driver's events are recycled and never destroyed, so a handle that a
// block of memory remembers stays valid, and steps after the first two create neither.
#pragma once
#include <atomic>

#include "core/backend/cuda/driver_api.h"
#include "core/backend/cuda/refusals.h"
#include "core/tensor/event.h"
#include "core/tensor/stream.h"

namespace tessera::cuda {

/// What the driver calls the stream.
inline StreamHandle handle_of(const Stream& stream) {
  return static_cast<StreamHandle>(stream.handle);
}

/// The calling thread's compute stream on card `device`. It is the thread's until that ends; then
/// another thread may get it.
Stream compute_stream(int device);
/// The calling thread's streams for copies beside its kernels, by turn. What ops on the compute
/// stream refuse is thrown by waits for these, too.
Stream copy_stream(int device, int turn);
/// The calling thread's stream for work that is captured.
Stream capture_stream(int device);
/// Makes `stream` the calling thread's compute stream on its card; returns the one before.
Stream exchange_compute_stream(const Stream& stream);

/// A stream of its own for as long as this lives; the work on it may outlive this.
class SideStream {
 public:
  enum class Priority { kNormal, kHigh };
  explicit SideStream(int device, Priority priority = Priority::kNormal);
  ~SideStream();
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;
  const Stream& stream() const { return stream_; }

 private:
  Stream stream_;
  Priority priority_;
};

/// A place in a stream: the end of all that was enqueued there before.
class StreamEvent final : public Event {
 public:
  enum class Timing { kOff, kOn };
  /// Records the end of what has been enqueued on `stream` so far.
  explicit StreamEvent(const Stream& stream, Timing timing = Timing::kOff);
  ~StreamEvent() override;
  static void* operator new(size_t bytes);
  static void operator delete(void* p, size_t bytes);

  bool done() const override;
  /// Throws what a kernel before the event failed with, and what an op of its stream has refused
  /// (refusals.h).
  void wait() override;
  /// Does nothing on the event's own stream, and where the event is known to have happened. Blocks
  /// for a stream that is not CUDA's.
  void wait_on(const Stream& stream) override;
  const Stream& stream() const { return stream_; }

 private:
  friend double elapsed_ms(StreamEvent& from, StreamEvent& to);
  Stream stream_;
  Timing timing_;
  Ref<Refusals> refusals_;  // of the thread whose stream it is
  uint32_t thrown_ = 0;     // by them when the event was recorded
  EventHandle event_ = nullptr;
  mutable std::atomic<bool> done_ = false;
};

/// Whether what is enqueued on `stream` becomes part of a graph, and does not run.
bool captures(const Stream& stream);

/// Milliseconds between two events with timing; waits for both.
double elapsed_ms(StreamEvent& from, StreamEvent& to);

/// Blocks until all that was enqueued on `stream` has ended; throws what failed there, and what an
/// op has refused (refusals.h).
void synchronize(const Stream& stream);

/// How many events the driver has made on card `device`: more than are in use, so that a step that
/// uses some more than the one before finds them.
int64_t events_made(int device);

/// How often the calling thread has waited for a card, or may have waited while the driver read or
/// wrote memory that is not pinned.
int64_t host_waits();
void note_host_wait();

}  // namespace tessera::cuda
