#include "core/backend/cuda/virtual_range.h"

#include "core/backend/cuda/context.h"
#include "core/backend/cuda/library.h"
#include "core/base/error.h"
#include "core/base/log.h"

namespace tessera::cuda {
namespace {

// Chunks that were unmapped leave holes, which a block that is larger than they are cannot use.
constexpr size_t kReservedPerByte = 8;

AllocationProperties memory_of(int device) {
  AllocationProperties p{};
  p.type = kAllocationPinned;
  p.location = {kLocationDevice, device};
  return p;
}

}  // namespace

VirtualRange::VirtualRange(int device, size_t chunk_bytes) : device_(device) {
  const Properties& card = properties(device);
  TESSERA_CHECK(card.virtual_memory,
                "cuda: {} offers no virtual memory management; set TESSERA_CUDA_ALLOCATOR=exact",
                card.name);
  CurrentDevice current(device);
  const AllocationProperties memory = memory_of(device);
  size_t granularity = 0;
  driver().memory_granularity(&granularity, &memory, kGranularityRecommended);
  chunk_bytes_ = (chunk_bytes + granularity - 1) / granularity * granularity;
  reserved_ = (kReservedPerByte * card.total_bytes + chunk_bytes_ - 1) / chunk_bytes_;
  driver().address_reserve(&base_, reserved_ * chunk_bytes_, 0, 0, 0);
  for (int peer = 0; peer < device_count(); ++peer)
    if (peer == device || can_access_peer(peer, device))
      access_.push_back({{kLocationDevice, peer}, kAccessReadWrite});
}

VirtualRange::~VirtualRange() {
  try {
    CurrentDevice current(device_);
    for (size_t chunk = 0; chunk < memory_.size(); ++chunk)
      if (mapped(chunk)) unmap_one(chunk);
    driver().address_free(base_, reserved_ * chunk_bytes_);
  } catch (const Error& e) {
    logging::warn("cuda: memory is not given back: {}", e.what());
  }
}

size_t VirtualRange::find_unmapped(size_t n) const {
  size_t run = 0;
  for (size_t chunk = 0; chunk < memory_.size(); ++chunk) {
    run = memory_[chunk] ? 0 : run + 1;
    if (run == n) return chunk + 1 - n;
  }
  return memory_.size() - run;
}

Result VirtualRange::map_one(size_t chunk) {
  const AllocationProperties properties = memory_of(device_);
  MemoryHandle memory = 0;
  ++calls_;
  const Result created = driver().physical_create.result(&memory, chunk_bytes_, &properties, 0);
  if (created != Result::kSuccess) return created;
  calls_ += 2;
  Result r = driver().memory_map.result(address(chunk), chunk_bytes_, 0, memory, 0);
  if (r != Result::kSuccess) {
    driver().physical_release.result(memory);
    return r;
  }
  memory_[chunk] = memory;
  ++mapped_;
  r = driver().memory_set_access.result(address(chunk), chunk_bytes_, access_.data(),
                                        access_.size());
  if (r != Result::kSuccess) unmap_one(chunk);
  return r;
}

void VirtualRange::unmap_one(size_t chunk) {
  calls_ += 2;
  driver().memory_unmap(address(chunk), chunk_bytes_);
  driver().physical_release(memory_[chunk]);
  memory_[chunk] = 0;
  --mapped_;
}

bool VirtualRange::map(size_t first, size_t n) {
  if (first + n > reserved_) return false;
  CurrentDevice current(device_);
  size_t free_bytes = 0, total = 0;
  driver().memory_info(&free_bytes, &total);  // so that what cannot be had is not begun
  if (free_bytes / chunk_bytes_ < n) return false;
  if (memory_.size() < first + n) memory_.resize(first + n, 0);
  for (size_t i = 0; i < n; ++i) {
    TESSERA_ASSERT(!mapped(first + i), "cuda: chunk {} is mapped already", first + i);
    const Result r = map_one(first + i);
    if (r == Result::kSuccess) continue;
    unmap(first, i);
    if (r == Result::kOutOfMemory) return false;
    raise(r, "mapping of memory");
  }
  return true;
}

void VirtualRange::unmap(size_t first, size_t n) {
  CurrentDevice current(device_);
  for (size_t i = 0; i < n; ++i) unmap_one(first + i);
  while (!memory_.empty() && memory_.back() == 0) memory_.pop_back();
}

}  // namespace tessera::cuda
