// The summary of the allocator: freed blocks are cached by their size, are used again, and go back
// to the system when they are released.
#include "core/tensor/memory_summary.h"

#include <gtest/gtest.h>

#include <thread>

#include "core/tensor/allocator.h"

namespace tessera {
namespace {

// Blocks that a request of `bytes` may get: rounded to a size class, behind guards under
// sanitizers.
int64_t cached_of(size_t bytes) {
  int64_t count = 0;
  for (const CachedBlocks& b : cached_cpu_blocks())
    if (b.block_bytes >= bytes && b.block_bytes <= bytes + bytes / 4 + 256) count += b.count;
  return count;
}

TEST(MemorySummary, FreedBlocksAreCachedBySize) {
  Allocator& a = cpu_allocator();
  // One size in each range: a thread's cache, regions, mappings.
  for (size_t bytes : {size_t(64), size_t(40) << 10, size_t(448) << 10, size_t(11) << 20}) {
    void* first = a.allocate(bytes - 16);
    void* second = a.allocate(bytes - 16);
    const int64_t before = cached_of(bytes);
    a.deallocate(first, bytes - 16);
    EXPECT_EQ(cached_of(bytes), before + 1) << bytes;
    a.deallocate(second, bytes - 16);
    EXPECT_EQ(cached_of(bytes), before + 2) << bytes;
    void* again = a.allocate(bytes - 16);
    EXPECT_EQ(cached_of(bytes), before + 1) << bytes;
    a.deallocate(again, bytes - 16);
  }
  EXPECT_GT(cached_of(size_t(11) << 20), 0);
  release_cached_cpu_memory();
  EXPECT_EQ(cached_of(size_t(11) << 20), 0);
}

// A tensor in a thread_local variable is such a block.
TEST(MemorySummary, ABlockThatOutlivesItsThreadsCacheIsCachedForOthers) {
  constexpr size_t kBytes = 1000;
  int64_t held = 0, after = 0;  // as seen by threads without blocks of their own
  std::thread([&] {
    struct Last {
      void* p = nullptr;
      ~Last() { cpu_allocator().deallocate(p, kBytes); }
    };
    thread_local Last last;  // made before the cache, so destroyed behind it
    last.p = cpu_allocator().allocate(kBytes);
    held = cached_of(kBytes);
  }).join();
  std::thread([&] { after = cached_of(kBytes); }).join();
  EXPECT_EQ(after, held + 1);
}

TEST(MemorySummary, IsATableForPeople) {
  Allocator& a = cpu_allocator();
  constexpr size_t kBytes = size_t(13) << 20;
  release_cached_cpu_memory();
  void* p = a.allocate(kBytes);
  a.deallocate(p, kBytes);
  const std::string text = memory_summary();
  for (const char* part :
       {"held now", "held at most", "from system", "cached", "of up to  16.0 MiB", "in 1 blocks\n"})
    EXPECT_NE(text.find(part), std::string::npos) << text;
  release_cached_cpu_memory();
  EXPECT_EQ(memory_summary().find("of up to  16.0 MiB"), std::string::npos);
}

}  // namespace
}  // namespace tessera
