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

#include "parallel/checkpoint/pages.h"

namespace tessera::checkpoint {

class Staging {
 public:
  using Clock = std::chrono::steady_clock;

  /// At most `limit` bytes; 0: as many as reserve() asks for.
  explicit Staging(size_t limit) : limit_(limit) {}

  /// Room for `bytes`, or for the limit; touches every page, so that copying meets no page fault.
  /// Only while nobody puts or takes.
  void reserve(size_t bytes);
  size_t capacity() const { return pages_.bytes(); }
  /// Forgets the last save. Only while nobody puts or takes.
  void restart();

  /// Copies, with the threads of the calling thread. Waits for room until `deadline`: false when
  /// there was none. Returns true at once when the writer gave up, whose error says why.
  bool put(const void* from, size_t bytes, Clock::time_point deadline);
  /// The next bytes, waiting for them: `most`, or what lies before the buffer's end where that is
  /// less. Of a save taken by equal multiples of 4 KiB, all but the last begin and end at such
  /// multiples. Empty when the producer gave up.
  std::span<const std::byte> take(size_t most);
  /// Makes room: the oldest `bytes` are done with.
  void release(size_t bytes);
  void writer_gave_up();
  void producer_gave_up();

 private:
  Pages pages_;
  size_t limit_;
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t in_ = 0, out_ = 0;  // bytes put and released since restart()
  bool no_writer_ = false, no_producer_ = false;
};

}  // namespace tessera::checkpoint
