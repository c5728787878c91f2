// Memory of a card in which every tensor is an allocation of the driver's own, so that tools which
// watch the driver (compute-sanitizer, the virtual GPU) see where each begins, ends and is freed.
// TESSERA_CUDA_ALLOCATOR=exact asks for it. Invariant: freeing waits until nothing uses the block,
// so a step takes far longer than with the caching allocator.
#pragma once
#include <mutex>
#include <unordered_map>

#include "core/backend/cuda/driver_api.h"
#include "core/backend/cuda/memory_ledger.h"
#include "core/tensor/allocator.h"
#include "core/tensor/event.h"

namespace tessera::cuda {

class ExactAllocator final : public Allocator {
 public:
  /// `limit_bytes` is the most that may be live; 0: what the card has.
  ExactAllocator(int device, size_t limit_bytes) : device_(device), limit_(limit_bytes) {}

  void* allocate(size_t bytes) override;
  void deallocate(void* p, size_t bytes) override { deallocate_after(p, bytes, {}); }
  void deallocate_after(void* p, size_t bytes, std::span<const Ref<Event>> pending) override;
  /// The block at `p` is `holder`'s from now on; other addresses are ignored.
  void set_holder(void* p, const MemoryHolder& holder);
  /// Memory that was allocated elsewhere for tensors counts as held, or no longer.
  void count_outside(const MemoryHolder& holder, size_t bytes, bool held);
  /// How many blocks were handed out.
  int64_t allocations() const;
  MemoryStats stats() const;
  void reset_peak();

 private:
  struct Block {
    StreamHandle home;
    const MemoryHolder* holder;
    size_t bytes;
  };
  const int device_;
  const size_t limit_;
  mutable std::mutex mutex_;
  MemoryLedger ledger_;
  std::unordered_map<void*, Block> blocks_;
  int64_t calls_ = 0;
};

}  // namespace tessera::cuda
