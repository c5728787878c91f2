#include "parallel/checkpoint/staging.h"

#include <sys/mman.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/base/error.h"
#include "core/base/parallel.h"

namespace tessera::checkpoint {
namespace {

constexpr size_t kHugePage = 2 << 20, kGrain = 256 << 10, kPage = 4096;

// Past the caches: nobody reads the copy soon, the model's own lines stay where they are, and the
// old bytes of the buffer need not be fetched first.
void stream(std::byte* to, const std::byte* from, size_t bytes) {
#ifdef __SSE2__
  constexpr size_t kLine = 64, kVector = 16;
  size_t head = std::min(bytes, size_t(-reinterpret_cast<uintptr_t>(to)) % kLine);
  std::memcpy(to, from, head);
  size_t at = head;
  for (; at + kLine <= bytes; at += kLine)
    for (size_t v = at; v < at + kLine; v += kVector)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + v),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + v)));
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

Staging::~Staging() {
  if (capacity_) munmap(data_, capacity_);
}

void Staging::reserve(size_t bytes) {
  size_t want = limit_ ? std::min(bytes, limit_) : bytes;
  want = (want + kHugePage - 1) / kHugePage * kHugePage;
  if (want <= capacity_) return;
  if (capacity_) munmap(data_, capacity_);
  capacity_ = 0;
  void* p = mmap(nullptr, want, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TESSERA_CHECK(p != MAP_FAILED,
                "checkpoint: no memory for {} bytes of staging; lower staging_bytes", want);
  data_ = static_cast<std::byte*>(p);
  capacity_ = want;
  madvise(p, want, MADV_HUGEPAGE);  // fewer faults; where there are none, small pages do
  parallel_for(int64_t(want / kPage), int64_t(kHugePage / kPage), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) data_[size_t(i) * kPage] = std::byte(0);
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
      bool in_time =
          changed_.wait_until(lock, deadline, [&] { return no_writer_ || in_ - out_ < capacity_; });
      if (no_writer_) return true;
      if (!in_time) return false;
      at = in_ % capacity_;
      room = std::min({bytes, capacity_ - (in_ - out_), capacity_ - at});
    }
    copy(data_ + at, source, room);
    source += room, bytes -= room;
    std::lock_guard lock(mutex_);
    in_ += room;
    changed_.notify_all();
  }
  return true;
}

std::span<const std::byte> Staging::take(size_t most) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return no_producer_ || in_ > out_; });
  if (in_ == out_) return {};
  size_t at = out_ % capacity_;
  return {data_ + at, std::min({most, in_ - out_, capacity_ - at})};
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
