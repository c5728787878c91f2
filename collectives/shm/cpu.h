// The few processor instructions that the shared-memory algorithm uses directly.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstring>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace tessera::detail {

/// The pause instruction for a polling loop.
inline void relax() {
#if defined(__SSE2__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// A fence between a store and a load that must not overtake it.
inline void store_before_load() {
#if defined(__SANITIZE_THREAD__)  // knows no fences
  static std::atomic<int> order{0};
  order.fetch_add(1, std::memory_order_seq_cst);
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

/// Prefetches all lines of a few KiB at once; a loop that waits for the first lines requests fewer
/// at a time.
inline void prefetch(const std::byte* from, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

/// A memcpy with streaming stores: another core that reads `to` afterwards finds it in memory
/// rather than in this core's cache. `to` is aligned to 64 bytes. A thread that sees a later
/// release store also sees what was written.
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
