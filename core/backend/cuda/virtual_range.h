// One range of addresses of a card, far larger than its memory, into which physical memory is
// mapped in chunks of one size. What lies in neighbouring chunks is contiguous whenever they were
// mapped, so memory that is free in pieces can be moved to where a large block needs it.
// Invariant: a chunk is mapped with its own physical memory, readable and writable by its card and
// by the cards that can reach it, or it is not mapped at all.
#pragma once
#include <cstdint>
#include <vector>

#include "core/backend/cuda/driver_api.h"

namespace tessera::cuda {

class VirtualRange {
 public:
  /// Reserves addresses for `device`; `chunk_bytes` is rounded up to what the card maps at least.
  /// Throws UserError where the card has no virtual memory management.
  VirtualRange(int device, size_t chunk_bytes);
  /// Unmaps what is mapped; nothing on the card may be using it.
  ~VirtualRange();
  VirtualRange(const VirtualRange&) = delete;
  VirtualRange& operator=(const VirtualRange&) = delete;

  size_t chunk_bytes() const { return chunk_bytes_; }
  DevicePtr address(size_t chunk) const { return base_ + chunk * chunk_bytes_; }
  size_t chunk_at(DevicePtr address) const { return size_t(address - base_) / chunk_bytes_; }
  /// Chunks from this one on have never been mapped, or not since they were unmapped.
  size_t end() const { return memory_.size(); }
  bool mapped(size_t chunk) const { return chunk < memory_.size() && memory_[chunk] != 0; }
  size_t mapped_bytes() const { return mapped_ * chunk_bytes_; }
  /// The first chunk of `n` unmapped ones in a row, the lowest there are.
  size_t find_unmapped(size_t n) const;

  /// Maps chunks [first, first + n). Returns false, and has mapped none, where the card has too
  /// little memory. Throws for other failures.
  bool map(size_t first, size_t n);
  /// Takes the memory of mapped chunks back. Nothing on the card may be using them.
  void unmap(size_t first, size_t n);
  /// How many calls of the driver that took: map and unmap make several for each chunk.
  int64_t driver_calls() const { return calls_; }

 private:
  Result map_one(size_t chunk);
  void unmap_one(size_t chunk);

  int device_;
  size_t chunk_bytes_ = 0, reserved_ = 0, mapped_ = 0;
  int64_t calls_ = 0;
  DevicePtr base_ = 0;
  std::vector<MemoryHandle> memory_;       // by chunk; 0: not mapped
  std::vector<AccessDescription> access_;  // of this card and those that reach it
};

}  // namespace tessera::cuda
