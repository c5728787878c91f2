#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>

#include "core/base/error.h"
#include "schedule.h"

using namespace tessera;

namespace mirror {
namespace {

constexpr size_t kRange = size_t(1) << 36;  // bytes of addresses; pages come when they are touched

char* reserve() {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* p = mmap(nullptr, 2 * kRange, PROT_NONE, kFlags, -1, 0);
  TESSERA_CHECK(p != MAP_FAILED, "mirror: no range of {} bytes of addresses is left", 2 * kRange);
  char* begin = static_cast<char*>(p);
  TESSERA_CHECK(mprotect(begin + kRange, kRange, PROT_READ | PROT_WRITE) == 0,
                "mirror: the system refuses {} bytes of memory", kRange);
  return begin;
}

}  // namespace

void* bytes_at(const void* address) {
  return address ? const_cast<char*>(static_cast<const char*>(address)) + kRange : nullptr;
}

void* Pinned::allocate(size_t bytes) {
  const size_t size = std::bit_ceil(std::max<size_t>(bytes, 64));
  std::lock_guard lock(mutex_);
  const auto found = std::ranges::find_if(freed_, [&](const Freed& f) {
    return f.bytes == size && std::ranges::all_of(f.pending, [](auto& e) { return e->done(); });
  });
  char* at = found == freed_.end() ? static_cast<char*>(std::aligned_alloc(64, size)) : found->at;
  if (found != freed_.end()) freed_.erase(found);
  blocks_[at] = size;
  return std::memset(at, 0xff, size);
}

void Pinned::deallocate_after(void* p, size_t bytes, std::span<const Ref<Event>> pending) {
  std::lock_guard lock(mutex_);
  freed_.push_back({static_cast<char*>(p),
                    std::bit_ceil(std::max<size_t>(bytes, 64)),
                    {pending.begin(), pending.end()}});
}

bool Pinned::owns(const void* p) {
  std::lock_guard lock(mutex_);
  const auto next = blocks_.upper_bound(static_cast<const char*>(p));
  if (next == blocks_.begin()) return false;
  const auto& [at, bytes] = *std::prev(next);
  return static_cast<const char*>(p) < at + bytes;
}

Memory::Memory(Device device) : device_(device), begin_(reserve()) {}

void* Memory::allocate(size_t bytes) {
  const size_t size = std::bit_ceil(std::max<size_t>(bytes, 64));
  const Stream stream = stream_of_thread(device_);
  Block block{};
  {
    std::lock_guard lock(mutex_);
    if (auto& blocks = free_[size]; !blocks.empty()) {
      block = std::move(blocks.back());
      blocks.pop_back();
    } else {
      TESSERA_CHECK(size <= kRange - size_t(stats_.system_bytes),
                    "mirror: out of memory: {} bytes asked for, {} of {} in use", bytes,
                    stats_.live_bytes, kRange);
      block.address = begin_ + stats_.system_bytes;
      stats_.system_bytes += int64_t(size), ++stats_.system_calls;
    }
    home_streams_[block.address] = stream;
    stats_.live_bytes += int64_t(size);
    stats_.peak_bytes = std::max(stats_.peak_bytes, stats_.live_bytes);
  }
  for (const Ref<Event>& e : block.pending) e->wait_on(stream);
  // Values of the last owner must not pass for those of the next: these bytes are NaN and -1.
  enqueue(stream, [p = bytes_at(block.address), size] { std::memset(p, 0xff, size); });
  return block.address;
}

void Memory::deallocate_after(void* p, size_t bytes, std::span<const Ref<Event>> pending) {
  const size_t size = std::bit_ceil(std::max<size_t>(bytes, 64));
  Block block{p, {pending.begin(), pending.end()}};
  std::unique_lock lock(mutex_);
  const Stream home = home_streams_.extract(p).mapped();
  lock.unlock();  // an op that ends frees memory under the scheduler's lock, which record takes
  if (Ref<Event> last = record(home)) block.pending.push_back(std::move(last));
  lock.lock();
  free_[size].push_back(std::move(block));
  stats_.live_bytes -= int64_t(size);
}

MemoryStats Memory::stats() {
  std::lock_guard lock(mutex_);
  return stats_;
}

void Memory::reset_peak() {
  std::lock_guard lock(mutex_);
  stats_.peak_bytes = stats_.live_bytes;
}

}  // namespace mirror
