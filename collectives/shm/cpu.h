// The few processor instructions that the shared-memory algorithm asks for by name.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstring>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace tessera::detail {

/// Inside a polling loop.
inline void relax() {
#if defined(__SSE2__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Between a store and a load that may not overtake it.
inline void store_before_load() {
#if defined(__SANITIZE_THREAD__)  // knows no fences
  static std::atomic<int> order{0};
  order.fetch_add(1, std::memory_order_seq_cst);
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

/// Asks for all lines of a few KiB at once; a loop that waits for some of them asks for fewer.
inline void prefetch(const std::byte* from, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

/// memcpy past the caches: another core that reads `to` afterwards finds it in memory rather than
/// in this core's cache. `to` is aligned to 64 bytes. What was written is visible to whoever sees a
/// later release store.
inline void stream_copy(std::byte* to, const std::byte* from, size_t bytes) {
#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__)
  size_t whole = bytes / 64 * 64;
  for (size_t i = 0; i < whole; i += 64)
    for (size_t j = i; j < i + 64; j += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + j),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + j)));
  std::memcpy(to + whole, from + whole, bytes - whole);
  _mm_sfence();
#else
  std::memcpy(to, from, bytes);
#endif
}

}  // namespace tessera::detail
