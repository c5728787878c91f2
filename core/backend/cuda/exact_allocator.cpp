#include "core/backend/cuda/exact_allocator.h"

#include <algorithm>

#include "core/backend/cuda/capture.h"
#include "core/backend/cuda/context.h"
#include "core/backend/cuda/library.h"
#include "core/backend/cuda/stream.h"
#include "core/base/error.h"
#include "core/tensor/wait_ended.h"

namespace tessera::cuda {

void* ExactAllocator::allocate(size_t bytes) {
  if (void* p = kept_block(*this, bytes)) return p;
  const Stream stream = allocation_stream(device_);
  CurrentDevice current(device_);
  std::lock_guard lock(mutex_);
  DevicePtr at = 0;
  Result r = Result::kOutOfMemory;
  if (!limit_ || size_t(ledger_.live_bytes()) + bytes <= limit_) {
    ++calls_;
    r = driver().memory_allocate.result(&at, std::max(bytes, size_t(1)));  // 0 bytes are refused
  }
  if (r == Result::kOutOfMemory) raise_out_of_memory({device_, bytes, 0, 0, limit_}, ledger_);
  if (r != Result::kSuccess) raise(r, driver().memory_allocate.symbol());
  auto* p = reinterpret_cast<void*>(at);
  blocks_[p] = {handle_of(stream), &MemoryLabel::holder(), bytes};
  ledger_.add(MemoryLabel::holder(), bytes);
  note_allocated(p);
  return p;
}

void ExactAllocator::deallocate_after(void* p, size_t bytes, std::span<const Ref<Event>> pending) {
  if (kept_for_graph(*this, p, bytes, pending)) return;
  Block block{};
  {
    std::lock_guard lock(mutex_);
    const auto found = blocks_.find(p);
    TESSERA_ASSERT(found != blocks_.end() && found->second.bytes == bytes,
                   "cuda: {} bytes at {} are freed twice, or with another size", bytes, p);
    block = found->second;
    blocks_.erase(found);
    ledger_.remove(*block.holder, bytes);
    ++calls_;
  }
  for (const Ref<Event>& e : pending) wait_ended(*e);
  CurrentDevice current(device_);
  // Called by destructors: what failed on the stream is thrown by whoever reads its results.
  driver().stream_synchronize.result(block.home);
  driver().memory_free.result(reinterpret_cast<DevicePtr>(p));
}

void ExactAllocator::count_outside(const MemoryHolder& holder, size_t bytes, bool held) {
  std::lock_guard lock(mutex_);
  held ? ledger_.add(holder, bytes) : ledger_.remove(holder, bytes);
}

MemoryStats ExactAllocator::stats() const {
  std::lock_guard lock(mutex_);
  return {ledger_.live_bytes(), ledger_.peak_bytes(), ledger_.live_bytes(), calls_};
}

void ExactAllocator::set_holder(void* p, const MemoryHolder& holder) {
  std::lock_guard lock(mutex_);
  const auto found = blocks_.find(p);
  if (found == blocks_.end()) return;
  ledger_.move(*found->second.holder, holder, found->second.bytes);
  found->second.holder = &holder;
}

int64_t ExactAllocator::allocations() const {
  std::lock_guard lock(mutex_);
  return ledger_.allocations();
}

void ExactAllocator::reset_peak() {
  std::lock_guard lock(mutex_);
  ledger_.reset_peak();
}

}  // namespace tessera::cuda
