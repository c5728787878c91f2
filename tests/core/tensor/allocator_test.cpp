// The recycling allocator: a steady loop asks the system for nothing, whichever thread frees.
#include "core/tensor/allocator.h"

#include <gtest/gtest.h>

#include <cstring>
#include <thread>
#include <vector>

#include "core/autograd/autograd.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"

namespace tessera {
namespace {

TEST(Allocator, BlocksAreAlignedAndUsable) {
  for (size_t bytes : {size_t(0), size_t(1), size_t(63), size_t(64), size_t(65), size_t(512),
                       size_t(513), size_t(65536), size_t(65537), size_t(1) << 20,
                       (size_t(2) << 20) - 1, size_t(2) << 20, size_t(5) << 20}) {
    void* p = cpu_allocator().allocate(bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(p) % (bytes >= size_t(2) << 20 ? size_t(2) << 20 : 64),
              0u)
        << bytes;
    std::memset(p, 0x5a, bytes);
    cpu_allocator().deallocate(p, bytes);
  }
}

TEST(Allocator, AThreadThatOnlyFreesObjectsKeepsFew) {
  constexpr size_t kBytes = 320, kCount = 20'000;
  std::vector<void*> made;
  for (size_t i = 0; i < kCount; ++i) made.push_back(pool_allocate(kBytes));
  std::thread([&] {
    size_t before = pool_held_bytes();
    for (void* p : made) pool_deallocate(p, kBytes);
    EXPECT_GT(pool_held_bytes(), before);
    EXPECT_LE(pool_held_bytes(), before + kPoolKeptBytes);
    size_t kept = pool_held_bytes();
    void* p = pool_allocate(kBytes);
    EXPECT_EQ(pool_held_bytes(), kept - kBytes);
    pool_deallocate(p, kBytes);
  }).join();
}

TEST(Allocator, AFreedBlockServesTheNextOfItsSize) {
  for (size_t bytes : {size_t(100), size_t(100'000), size_t(10) << 20}) {
    void* p = cpu_allocator().allocate(bytes);
    cpu_allocator().deallocate(p, bytes);
    void* q = cpu_allocator().allocate(bytes - 7);
    EXPECT_EQ(p, q) << bytes;
    cpu_allocator().deallocate(q, bytes - 7);
  }
}

TEST(Allocator, ASteadyLoopAsksTheSystemForNothing) {
  Tensor w = ones({300, 300});
  w.requires_grad_();
  auto step = [&] {
    Tensor x = ones({300, 300});
    backward(mean(tanh(x * w) + sum(exp(w * 0.1), {0})));
    w.set_grad({});
  };
  for (int i = 0; i < 3; ++i) step();
  MemoryStats before = cpu_memory_stats();
  for (int i = 0; i < 20; ++i) step();
  MemoryStats after = cpu_memory_stats();
  EXPECT_EQ(after.system_calls, before.system_calls);
  EXPECT_EQ(after.system_bytes, before.system_bytes);
  EXPECT_EQ(after.live_bytes, before.live_bytes) << "a step leaves nothing behind";
}

TEST(Allocator, PeakIsTheMostHeldAtOnce) {
  constexpr int64_t kBytes = 8 << 20;
  reset_peak_cpu_memory();
  int64_t base = cpu_memory_stats().live_bytes;
  { Tensor a = empty({kBytes / 4}), b = empty({kBytes / 4}); }
  Tensor c = empty({kBytes / 4});
  MemoryStats s = cpu_memory_stats();
  EXPECT_GE(s.peak_bytes - base, 2 * kBytes);
  EXPECT_LT(s.peak_bytes - base, 2 * kBytes + kBytes / 2);
  reset_peak_cpu_memory();
  EXPECT_EQ(cpu_memory_stats().peak_bytes, cpu_memory_stats().live_bytes);
}

TEST(Allocator, ArenasAreRoundedToPages) {
  for (size_t bytes : {size_t(0), size_t(100'000), size_t(27'500'001)}) {
    MemoryStats before = cpu_memory_stats();
    {
      auto arena = make_ref<Storage>(bytes, kCPU, cpu_arena_allocator());
      EXPECT_EQ(uintptr_t(arena->data()) % 64, 0u);
      if (bytes) std::memset(arena->data(), 1, bytes);
      MemoryStats now = cpu_memory_stats();
      EXPECT_GE(now.live_bytes - before.live_bytes, int64_t(bytes));
      EXPECT_LE(now.live_bytes - before.live_bytes, int64_t(bytes) + 4096);
      EXPECT_GE(now.peak_bytes, now.live_bytes);
    }
    EXPECT_EQ(cpu_memory_stats().live_bytes, before.live_bytes);
    EXPECT_EQ(cpu_memory_stats().system_bytes, before.system_bytes);
  }
}

// One thread makes blocks of every kind of list and another frees them; nothing grows without
// bound.
TEST(Allocator, OtherThreadsMayFree) {
  auto round = [] {
    std::vector<Tensor> made;
    for (int64_t n : {10, 1000, 100'000, 1'000'000})
      for (int i = 0; i < 100 / (n / 10'000 + 1) + 1; ++i) made.push_back(full({n}, double(i)));
    std::thread other([list = std::move(made)]() mutable {
      for (Tensor& t : list) EXPECT_GE(t.data<float>()[t.numel() - 1], 0);
      list.clear();
    });
    other.join();
  };
  for (int i = 0; i < 3; ++i) round();
  int64_t calls = cpu_memory_stats().system_calls;
  for (int i = 0; i < 20; ++i) round();
  EXPECT_LE(cpu_memory_stats().system_calls - calls, 1);
}

TEST(Allocator, ManyThreadsAtOnce) {
  std::vector<std::thread> threads;
  for (int r = 0; r < 4; ++r)
    threads.emplace_back([r] {
      for (int i = 0; i < 300; ++i) {
        Tensor x = full({100 + 37 * i}, double(r)), y = x + 1;
        ASSERT_EQ(y.data<float>()[y.numel() - 1], float(r + 1));
      }
    });
  for (auto& t : threads) t.join();
}

TEST(Allocator, ReleaseReturnsLargeBlocks) {
  int64_t before = cpu_memory_stats().system_bytes;
  { Tensor t = empty({int64_t(32) << 20}); }
  EXPECT_GE(cpu_memory_stats().system_bytes, before);
  release_cached_cpu_memory();
  EXPECT_LE(cpu_memory_stats().system_bytes, before);
}

TEST(Allocator, ReleaseReturnsUnusedRegionsOfMediumBlocks) {
  release_cached_cpu_memory();
  int64_t before = cpu_memory_stats().system_bytes;
  constexpr int64_t kBlock = 300'000, kCount = 400;  // several regions
  std::vector<Tensor> made;
  for (int64_t i = 0; i < kCount; ++i) made.push_back(full({kBlock / 4}, double(i)));
  EXPECT_GT(cpu_memory_stats().system_bytes, before + kBlock * kCount - (int64_t(64) << 20));
  Tensor kept = made[kCount / 2];
  made.clear();
  release_cached_cpu_memory();
  EXPECT_LE(cpu_memory_stats().system_bytes, before + (int64_t(64) << 20))
      << "all but the kept one's";
  EXPECT_EQ(kept.data<float>()[kBlock / 4 - 1], float(kCount / 2));
  for (int64_t i = 0; i < kCount; ++i) made.push_back(full({kBlock / 4}, double(i)));
  for (int64_t i = 0; i < kCount; ++i) {
    EXPECT_EQ(made[size_t(i)].data<float>()[0], float(i));
    EXPECT_EQ(made[size_t(i)].data<float>()[kBlock / 4 - 1], float(i));
  }
  EXPECT_EQ(kept.data<float>()[0], float(kCount / 2));
}

}  // namespace
}  // namespace tessera
