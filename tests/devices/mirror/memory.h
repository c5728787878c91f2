// Memory of one device: addresses that nobody may touch, and the bytes behind them at a constant
// distance, where kernels work. A freed block goes to the next owner with the events that it waits
// for. Invariant: the host waits for nothing here.
#pragma once
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "core/tensor/allocator.h"
#include "core/tensor/event.h"

namespace mirror {

/// Where the bytes of a device's address are.
void* bytes_at(const void* address);

class Memory final : public tessera::Allocator {
 public:
  explicit Memory(tessera::Device device);
  void* allocate(size_t bytes) override;
  void deallocate(void* p, size_t bytes) override { deallocate_after(p, bytes, {}); }
  void deallocate_after(void* p, size_t bytes,
                        std::span<const tessera::Ref<tessera::Event>> pending) override;
  tessera::MemoryStats stats();
  void reset_peak();

 private:
  struct Block {
    void* address;
    std::vector<tessera::Ref<tessera::Event>> pending;
  };
  const tessera::Device device_;
  char* const begin_;
  std::mutex mutex_;
  tessera::MemoryStats stats_;
  std::map<size_t, std::vector<Block>> free_;                // by size
  std::unordered_map<void*, tessera::Stream> home_streams_;  // of blocks in use
};

/// Memory of the host that copies use while the host goes on. A block that is freed gets values
/// that are nobody's when the copies that use it have run, and then a next owner.
class Pinned final : public tessera::Allocator {
 public:
  void* allocate(size_t bytes) override;
  void deallocate(void* p, size_t bytes) override { deallocate_after(p, bytes, {}); }
  void deallocate_after(void* p, size_t bytes,
                        std::span<const tessera::Ref<tessera::Event>> pending) override;
  bool owns(const void* p);

 private:
  struct Freed {
    char* at;
    size_t bytes;
    std::vector<tessera::Ref<tessera::Event>> pending;
  };
  std::mutex mutex_;
  std::map<const char*, size_t> blocks_;  // every one, and its bytes
  std::vector<Freed> freed_;
};

}  // namespace mirror
