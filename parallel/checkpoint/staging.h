// The bounded buffer between a training thread, which may only be held up for a copy, and the
// thread that writes to disk. Invariant: bytes come out in the order in which they went in; the
// memory is at most `limit`, allocated once and reused by every save. A save that fits is copied in
// one go; a larger one makes the producer wait for the writer.
#pragma once
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <span>

namespace tessera::checkpoint {

class Staging {
 public:
  using Clock = std::chrono::steady_clock;

  /// At most `limit` bytes; 0: as many as reserve() asks for.
  explicit Staging(size_t limit) : limit_(limit) {}
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  /// Room for `bytes`, or for the limit; touches every page, so that copying meets no page fault.
  /// Only while nobody puts or takes.
  void reserve(size_t bytes);
  size_t capacity() const { return capacity_; }
  /// Forgets the last save. Only while nobody puts or takes.
  void restart();

  /// Copies, with the threads of the calling thread. Waits for room until `deadline`: false when
  /// there was none. Returns true at once when the writer gave up, whose error says why.
  bool put(const void* from, size_t bytes, Clock::time_point deadline);
  /// The next bytes, at least one and at most `most`, waiting for them. Empty when the producer
  /// gave up.
  std::span<const std::byte> take(size_t most);
  /// Makes room: the oldest `bytes` are done with.
  void release(size_t bytes);
  void writer_gave_up();
  void producer_gave_up();

 private:
  std::byte* data_ = nullptr;
  size_t limit_, capacity_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t in_ = 0, out_ = 0;  // bytes put and released since restart()
  bool no_writer_ = false, no_producer_ = false;
};

}  // namespace tessera::checkpoint
