// Memory of tensors. An Allocator is that of one device. The CPU's recycles: a freed block goes to
// a free list of its size class and serves the next request of that class, so a steady training
// step asks the system for nothing. Blocks above 64 KiB lie on huge pages, those of 2 MiB and more
// on their own. Invariant: allocate and deallocate see the same byte count.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/base/ref.h"

namespace tessera {

class Event;

class Allocator {
 public:
  virtual ~Allocator() = default;
  /// Uninitialised memory, aligned to 64 bytes. Throws UserError naming the size when the system
  /// has none left.
  virtual void* allocate(size_t bytes) = 0;
  virtual void deallocate(void* p, size_t bytes) = 0;
  /// As deallocate, of a block that is in use until `pending` have happened. A device's allocator
  /// keeps them with the block, and the stream of its next owner waits; the default waits here,
  /// and leaves what they failed with to those who use their results.
  virtual void deallocate_after(void* p, size_t bytes, std::span<const Ref<Event>> pending);
};

struct MemoryStats {
  int64_t live_bytes = 0;    // held by storages now
  int64_t peak_bytes = 0;    // most ever held, since reset_peak_cpu_memory
  int64_t system_bytes = 0;  // taken from the system and not returned
  int64_t system_calls = 0;  // how often the system was asked; constant over a steady step
};

/// The process-wide recycling CPU allocator (thread-safe; small blocks are cached per thread).
Allocator& cpu_allocator();
/// An allocator for few blocks that live long (arenas): it rounds them to pages, not to a size
/// class, and returns them to the system when they are freed. cpu_memory_stats() counts them too.
Allocator& cpu_arena_allocator();
MemoryStats cpu_memory_stats();
void reset_peak_cpu_memory();
/// Returns cached blocks to the system: those of 2 MiB and more, and smaller ones above 64 KiB
/// where all of the 32 MiB around them are unused.
void release_cached_cpu_memory();

/// Fixed-size objects of the dispatch path (tensor handles, graph nodes): recycled per thread. A
/// thread keeps up to kPoolKeptBytes of each size, so one that only frees what others make does not
/// hoard.
void* pool_allocate(size_t bytes);
void pool_deallocate(void* p, size_t bytes);
inline constexpr size_t kPoolKeptBytes = size_t(1) << 20;
/// What the calling thread's pool keeps for later.
size_t pool_held_bytes();

}  // namespace tessera
