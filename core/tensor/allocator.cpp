#include "core/tensor/allocator.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <mutex>
#include <new>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/tensor/event.h"
#include "core/tensor/memory_summary.h"
#include "core/tensor/wait_ended.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace tessera {
namespace {

// Under the address sanitizer recycled memory is guarded as malloc's would be: free blocks are, and
// so is what lies behind the bytes that were asked for.
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kGuardBytes = 64;
void guard(void* p, size_t bytes) { ASAN_POISON_MEMORY_REGION(p, bytes); }
void unguard(void* p, size_t bytes) { ASAN_UNPOISON_MEMORY_REGION(p, bytes); }
#else
constexpr size_t kGuardBytes = 0;
void guard(void*, size_t) {}
void unguard(void*, size_t) {}
#endif

constexpr size_t kAlign = 64;
constexpr size_t kHugePage = size_t(2) << 20;
constexpr int kStepsPerDoubling = 8;  // a block is at most 1/8 larger than asked for
constexpr int kMinShift = 9;          // the smallest class steps by 64 bytes: 8 steps up to 512
constexpr int kClasses = (48 - kMinShift) * kStepsPerDoubling + kStepsPerDoubling;
constexpr size_t kSmallBytes = 64 << 10;   // up to here blocks are cached per thread
constexpr size_t kThreadCacheBlocks = 64;  // of each small class
constexpr size_t kSlabBytes = 1 << 20;     // small blocks are carved from slabs
// Blocks between small ones and a huge page are carved from regions of huge pages, which saves most
// address translations of a step over tensors of this size. A region is aligned to its size.
constexpr size_t kRegionBytes = size_t(32) << 20;

constexpr int kSmallClasses = kStepsPerDoubling + (16 - kMinShift) * kStepsPerDoubling;

struct SizeClass {
  int index;
  size_t bytes;
};

// Classes step by 64 bytes up to 512 bytes, then eight per doubling.
SizeClass size_class(size_t bytes) {
  bytes = std::max<size_t>(bytes, 1);
  if (bytes <= (size_t(1) << kMinShift)) {
    size_t step = (bytes + kAlign - 1) / kAlign;
    return {int(step) - 1, step * kAlign};
  }
  int shift = std::bit_width(bytes - 1) - 1;  // 2^shift < bytes <= 2^(shift+1)
  size_t step = size_t(1) << (shift - 3);
  size_t k = (bytes - (size_t(1) << shift) + step - 1) / step;  // 1..8
  return {kStepsPerDoubling + (shift - kMinShift) * kStepsPerDoubling + int(k) - 1,
          (size_t(1) << shift) + k * step};
}

// Bytes of a class above the smallest ones.
size_t class_bytes(int index) {
  const int octave = (index - kStepsPerDoubling) / kStepsPerDoubling + kMinShift,
            k = (index - kStepsPerDoubling) % kStepsPerDoubling + 1;
  return (size_t(1) << octave) + size_t(k) * (size_t(1) << (octave - 3));
}

struct FreeBlock {
  FreeBlock* next;
};

struct Counters {
  std::atomic<int64_t> live{0}, peak{0}, system{0}, calls{0};
};
Counters counters;

// `align` matters from a huge page on; smaller blocks are aligned to kAlign.
void* from_system(size_t bytes, size_t align = kHugePage) {
  counters.calls.fetch_add(1, std::memory_order_relaxed);
  void* p = nullptr;
  if (bytes >= kHugePage) {
    // Over-map, then trim to a boundary: an unaligned mapping would get no huge pages at its ends.
    size_t span = bytes + align;
    void* raw = mmap(nullptr, span, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw != MAP_FAILED) {
      auto begin = reinterpret_cast<uintptr_t>(raw), aligned = (begin + align - 1) & ~(align - 1);
      size_t rounded = (bytes + 4095) & ~size_t(4095);
      if (aligned > begin) munmap(raw, aligned - begin);
      if (begin + span > aligned + rounded)
        munmap(reinterpret_cast<void*>(aligned + rounded), begin + span - aligned - rounded);
      p = reinterpret_cast<void*>(aligned);
      madvise(p, rounded, MADV_HUGEPAGE);
    }
  } else {
    p = std::aligned_alloc(kAlign, (bytes + kAlign - 1) & ~(kAlign - 1));
  }
  TESSERA_CHECK(p != nullptr,
                "allocate: the system refused {} bytes ({} bytes are held by tensors); use a "
                "smaller model or batch, or shard the model over more ranks",
                bytes, counters.live.load());
  counters.system.fetch_add(int64_t(bytes), std::memory_order_relaxed);
  return p;
}

void to_system(void* p, size_t bytes) {
  counters.system.fetch_sub(int64_t(bytes), std::memory_order_relaxed);
  unguard(p, bytes);
  if (bytes >= kHugePage)
    munmap(p, (bytes + 4095) & ~size_t(4095));
  else
    std::free(p);
}

struct Region {
  char* base;
  size_t carved;
};
char* region_of(void* p) {
  return reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(p) & ~(kRegionBytes - 1));
}

// Blocks shared by all threads: large ones always, small ones when a thread's cache overflows or
// ends.
struct SharedLists {
  std::mutex mutex;
  std::array<std::vector<void*>, kClasses> free;
  char* slab = nullptr;
  size_t slab_left = 0;
  std::vector<Region> regions;  // blocks are carved from the last

  void* take(SizeClass c) {
    std::lock_guard lock(mutex);
    auto& list = free[size_t(c.index)];
    if (!list.empty()) {
      void* p = list.back();
      list.pop_back();
      return p;
    }
    if (c.bytes >= kHugePage) return nullptr;
    if (c.bytes > kSmallBytes) return carve(c.bytes);
    if (slab_left < c.bytes) {  // what is left of the old slab is lost: less than one small block
      slab = static_cast<char*>(from_system(kSlabBytes));
      slab_left = kSlabBytes;
    }
    void* p = slab;
    slab += c.bytes;
    slab_left -= c.bytes;
    return p;
  }
  void* carve(size_t bytes) {
    if (regions.empty() || kRegionBytes - regions.back().carved < bytes)
      regions.push_back({static_cast<char*>(from_system(kRegionBytes, kRegionBytes)), 0});
    Region& r = regions.back();
    r.carved += bytes;
    return r.base + (r.carved - bytes);
  }
  void give(SizeClass c, void* p) {
    std::lock_guard lock(mutex);
    free[size_t(c.index)].push_back(p);
  }
  void release();
};
// Large blocks, and regions without a block in use, go back to the system. Small blocks
// live in slabs, which are never returned.
void SharedLists::release() {
  std::lock_guard lock(mutex);
  std::unordered_map<char*, size_t> unused;  // bytes of each region
  for (int i = kSmallClasses; i < kClasses; ++i) {
    const size_t bytes = class_bytes(i);
    for (void* p : free[size_t(i)])
      if (bytes >= kHugePage)
        to_system(p, bytes);
      else
        unused[region_of(p)] += bytes;
    if (bytes >= kHugePage) free[size_t(i)].clear();
  }
  std::erase_if(regions, [&](const Region& r) {
    auto found = unused.find(r.base);
    if (found == unused.end()) return false;
    if (found->second < r.carved) {
      unused.erase(found);
      return false;
    }
    to_system(r.base, kRegionBytes);
    return true;
  });
  // Regions that are left in `unused` have been returned.
  for (int i = kSmallClasses; i < kClasses && class_bytes(i) < kHugePage; ++i)
    std::erase_if(free[size_t(i)], [&](void* p) { return unused.contains(region_of(p)); });
}

SharedLists& shared_lists() {
  static auto* lists = new SharedLists;  // leaked: storages may die after statics
  return *lists;
}

struct ThreadCache {
  std::array<FreeBlock*, kSmallClasses> head{};
  std::array<uint32_t, kSmallClasses> count{};
  ~ThreadCache();
  void flush();
};
// The pointer, trivially destructible, tells storages that outlive the cache (statics, thread exit)
// that it is gone.
thread_local bool cache_gone = false;
thread_local ThreadCache cache;

ThreadCache::~ThreadCache() {
  flush();
  cache_gone = true;
}
void ThreadCache::flush() {
  for (int i = 0; i < kSmallClasses; ++i) {
    while (FreeBlock* b = head[size_t(i)]) {
      head[size_t(i)] = b->next;
      shared_lists().give({i, 0}, b);
    }
    count[size_t(i)] = 0;
  }
}

void count_live(size_t bytes) {
  int64_t live =
      counters.live.fetch_add(int64_t(bytes), std::memory_order_relaxed) + int64_t(bytes);
  if (live > counters.peak.load(std::memory_order_relaxed))
    counters.peak.store(live, std::memory_order_relaxed);
}

class CpuAllocator final : public Allocator {
 public:
  void* allocate(size_t bytes) override {
    SizeClass c = size_class(bytes + kGuardBytes);
    auto* p = static_cast<char*>(take(c));
    unguard(p, bytes);
    guard(p + bytes, c.bytes - bytes);
    count_live(c.bytes);
    return p;
  }
  void* take(SizeClass c) {
    if (c.bytes <= kSmallBytes && !cache_gone) {
      FreeBlock*& head = cache.head[size_t(c.index)];
      if (head) {
        void* p = head;
        head = head->next;
        --cache.count[size_t(c.index)];
        return p;
      }
    }
    if (void* p = shared_lists().take(c)) return p;
    return from_system(c.bytes);
  }
  void deallocate(void* p, size_t bytes) override {
    SizeClass c = size_class(bytes + kGuardBytes);
    guard(p, c.bytes);
    counters.live.fetch_sub(int64_t(c.bytes), std::memory_order_relaxed);
    if (c.bytes <= kSmallBytes && !cache_gone &&
        cache.count[size_t(c.index)] < kThreadCacheBlocks) {
      unguard(p, sizeof(FreeBlock));  // the list runs through it
      auto* b = static_cast<FreeBlock*>(p);
      b->next = cache.head[size_t(c.index)];
      cache.head[size_t(c.index)] = b;
      ++cache.count[size_t(c.index)];
      return;
    }
    shared_lists().give(c, p);
  }
};

class CpuArenaAllocator final : public Allocator {
 public:
  void* allocate(size_t bytes) override {
    void* p = from_system(pages(bytes));
    count_live(pages(bytes));
    return p;
  }
  void deallocate(void* p, size_t bytes) override {
    counters.live.fetch_sub(int64_t(pages(bytes)), std::memory_order_relaxed);
    to_system(p, pages(bytes));
  }

 private:
  static size_t pages(size_t bytes) { return (std::max<size_t>(bytes, 1) + 4095) & ~size_t(4095); }
};

}  // namespace

void Allocator::deallocate_after(void* p, size_t bytes, std::span<const Ref<Event>> pending) {
  for (const Ref<Event>& e : pending) wait_ended(*e);
  deallocate(p, bytes);
}

Allocator& cpu_arena_allocator() {
  static auto* allocator = new CpuArenaAllocator;
  return *allocator;
}

Allocator& cpu_allocator() {
  static auto* allocator = new CpuAllocator;
  return *allocator;
}

MemoryStats cpu_memory_stats() {
  return {counters.live.load(), counters.peak.load(), counters.system.load(),
          counters.calls.load()};
}

void reset_peak_cpu_memory() { counters.peak.store(counters.live.load()); }

void release_cached_cpu_memory() { shared_lists().release(); }

std::vector<CachedBlocks> cached_cpu_blocks() {
  std::vector<CachedBlocks> out;
  SharedLists& lists = shared_lists();
  std::lock_guard lock(lists.mutex);
  for (int i = 0; i < kClasses; ++i) {
    auto count = int64_t(lists.free[size_t(i)].size());
    if (i < kSmallClasses && !cache_gone) count += cache.count[size_t(i)];
    const size_t bytes = i < kStepsPerDoubling ? size_t(i + 1) * kAlign : class_bytes(i);
    if (count) out.push_back({bytes, count});
  }
  return out;
}

namespace {
constexpr size_t kPoolStep = 32, kPoolMax = 1024;
constexpr size_t pool_bytes(size_t slot) { return (slot + 1) * kPoolStep; }
struct ObjectPool {
  std::array<FreeBlock*, kPoolMax / kPoolStep> head{};
  std::array<uint32_t, kPoolMax / kPoolStep> count{};
  ~ObjectPool() {
    gone = true;
    for (FreeBlock* b : head)
      while (b) std::free(std::exchange(b, b->next));
  }
  static thread_local bool gone;
};
thread_local bool ObjectPool::gone = false;
thread_local ObjectPool pool;
}  // namespace

void* pool_allocate(size_t bytes) {
  size_t slot = (bytes - 1) / kPoolStep;
  if (bytes <= kPoolMax && !ObjectPool::gone) {
    if (FreeBlock* b = pool.head[slot]) {
      pool.head[slot] = b->next;
      --pool.count[slot];
      unguard(b, pool_bytes(slot));
      return b;
    }
  }
  void* p = std::malloc(pool_bytes(slot));
  if (!p) throw std::bad_alloc();
  return p;
}

void pool_deallocate(void* p, size_t bytes) {
  size_t slot = (bytes - 1) / kPoolStep;
  if (bytes > kPoolMax || ObjectPool::gone ||
      (pool.count[slot] + 1) * pool_bytes(slot) > kPoolKeptBytes)
    return std::free(p);
  auto* b = static_cast<FreeBlock*>(p);
  b->next = pool.head[slot];
  pool.head[slot] = b;
  ++pool.count[slot];
  guard(b + 1, pool_bytes(slot) - sizeof(FreeBlock));
}

size_t pool_held_bytes() {
  size_t held = 0;
  if (!ObjectPool::gone)
    for (size_t slot = 0; slot < pool.count.size(); ++slot)
      held += pool.count[slot] * pool_bytes(slot);
  return held;
}

}  // namespace tessera
