#include "parallel/checkpoint/staging.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/base/parallel.h"

namespace tessera::checkpoint {
namespace {

constexpr size_t kGrain = 256 << 10, kPage = 4096;

// Past the caches: nobody reads the copy soon, the model's own lines stay where they are, and the
// old bytes of the buffer need not be fetched first. The hardware prefetches within a page only.
void stream(std::byte* to, const std::byte* from, size_t bytes) {
#ifdef __SSE2__
  constexpr size_t kLine = 64, kVector = 16, kAhead = 4096;
  size_t head = std::min(bytes, size_t(-reinterpret_cast<uintptr_t>(to)) % kLine);
  std::memcpy(to, from, head);
  size_t at = head;
  for (; at + kLine <= bytes; at += kLine) {
    _mm_prefetch(reinterpret_cast<const char*>(from + at + kAhead), _MM_HINT_NTA);
    for (size_t v = at; v < at + kLine; v += kVector)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + v),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + v)));
  }
  _mm_sfence();
  std::memcpy(to + at, from + at, bytes - at);
#else
  std::memcpy(to, from, bytes);
#endif
}

void copy(std::byte* to, const std::byte* from, size_t bytes) {
  parallel_for(int64_t(bytes), kGrain, [&](int64_t begin, int64_t end) {
    stream(to + begin, from + begin, size_t(end - begin));
  });
}

}  // namespace

void Staging::reserve(size_t bytes) {
  size_t want = limit_ ? std::min(bytes, limit_) : bytes;
  want = (want + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  if (want <= capacity()) return;
  pages_ = {};  // before the new ones are taken
  pages_ = Pages(want);
  parallel_for(int64_t(want / kPage), int64_t(kHugePageBytes / kPage),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i)
                   pages_.data()[size_t(i) * kPage] = std::byte(0);
               });
}

void Staging::restart() {
  std::lock_guard lock(mutex_);
  in_ = out_ = 0;
  no_writer_ = no_producer_ = false;
}

bool Staging::put(const void* from, size_t bytes, Clock::time_point deadline) {
  auto* source = static_cast<const std::byte*>(from);
  while (bytes > 0) {
    size_t at, room;
    {
      std::unique_lock lock(mutex_);
      bool in_time = changed_.wait_until(lock, deadline,
                                         [&] { return no_writer_ || in_ - out_ < capacity(); });
      if (no_writer_) return true;
      if (!in_time) return false;
      at = in_ % capacity();
      room = std::min({bytes, capacity() - (in_ - out_), capacity() - at});
    }
    copy(pages_.data() + at, source, room);
    source += room, bytes -= room;
    std::lock_guard lock(mutex_);
    in_ += room;
    changed_.notify_all();
  }
  return true;
}

std::span<const std::byte> Staging::take(size_t most) {
  std::unique_lock lock(mutex_);
  size_t at = out_ % capacity(), bytes = std::min(most, capacity() - at);
  changed_.wait(lock, [&] { return no_producer_ || in_ - out_ >= bytes; });
  if (in_ - out_ < bytes) return {};
  return {pages_.data() + at, bytes};
}

void Staging::release(size_t bytes) {
  std::lock_guard lock(mutex_);
  out_ += bytes;
  changed_.notify_all();
}

void Staging::writer_gave_up() {
  std::lock_guard lock(mutex_);
  no_writer_ = true;
  changed_.notify_all();
}

void Staging::producer_gave_up() {
  std::lock_guard lock(mutex_);
  no_producer_ = true;
  changed_.notify_all();
}

}  // namespace tessera::checkpoint
