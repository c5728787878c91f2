// Host memory that cards read and write while the host goes on (page-locked). Getting it from the
// driver takes about a millisecond, so blocks are kept by size class, and small ones are cut from
// slabs of one class: the first steps take what later ones need. A block that is freed while a copy
// still uses it comes back when the copy's event has happened. Invariant: a block that is handed
// out is used by nobody else, card or host.
#pragma once
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "core/base/small_vector.h"
#include "core/tensor/allocator.h"
#include "core/tensor/event.h"

namespace tessera::cuda {

class PinnedAllocator final : public Allocator {
 public:
  /// Returns to the driver what is cached. All blocks were freed.
  ~PinnedAllocator() override;
  /// Blocks up to this size are cut from slabs.
  static constexpr size_t kSmallBytes = size_t(256) << 10;
  static constexpr size_t kSlabBytes = size_t(2) << 20;

  /// Host memory, aligned to a page, that every card can copy from and to. Throws UserError where
  /// there is no card, and where the system has no memory that can be locked.
  void* allocate(size_t bytes) override;
  void deallocate(void* p, size_t bytes) override { deallocate_after(p, bytes, {}); }
  /// The block comes back when all of `pending` have happened; nobody waits for that.
  void deallocate_after(void* p, size_t bytes, std::span<const Ref<Event>> pending) override;
  /// Whether `p` points into memory of this allocator.
  bool owns(const void* p) const;
  MemoryStats stats() const;
  /// Returns to the driver what is cached and in nobody's use, slabs as a whole; waits for copies
  /// of freed blocks.
  void release_cached();

 private:
  struct Freed {
    void* at;
    size_t bytes;  // of its class
    SmallVector<Ref<Event>, 2> pending;
  };
  using Slabs = std::map<const void*, size_t>;  // bytes, by address
  void collect(bool waits);
  void add_slab(size_t block_bytes);
  Slabs::const_iterator slab_of(const void* p) const;

  mutable std::mutex mutex_;
  std::vector<Freed> freed_;                     // in use by copies, perhaps no longer
  std::map<size_t, std::vector<void*>> cached_;  // by size class
  Slabs slabs_;                                  // all that the driver gave, each of one class
  std::unordered_map<void*, size_t> live_;       // bytes that were asked for
  MemoryStats stats_;
};

/// The process-wide allocator of pinned memory.
PinnedAllocator& pinned_allocator();

}  // namespace tessera::cuda
