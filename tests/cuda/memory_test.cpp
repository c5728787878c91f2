// The allocators of card memory and of pinned memory, on any card, real or virtual.
#include <sys/syscall.h>

#include <atomic>
#include <map>
#include <random>
#include <semaphore>
#include <thread>

#include "core/backend/cuda/exact_allocator.h"
#include "core/backend/cuda/memory_ledger.h"
#include "core/backend/cuda/pinned.h"
#include "core/base/error.h"
#include "tests/collectives/wakeups.h"
#include "tests/cuda/card.h"

namespace tessera::cuda {
namespace {

constexpr size_t kMiB = size_t(1) << 20;

class CudaMemory : public OnCard {
 protected:
  /// Allocates on a thread, and so on a stream, of its own.
  void* allocate_elsewhere(Allocator& a, size_t bytes, Stream* stream = nullptr) {
    void* p = nullptr;
    std::thread([&] {
      if (stream) *stream = compute_stream(0);
      p = a.allocate(bytes);
    }).join();
    return p;
  }
};

TEST_F(CudaMemory, BlocksAreAlignedAndApart) {
  CachingAllocator a(0, 64 * kMiB);
  std::map<size_t, size_t> taken;  // from, to
  std::vector<std::pair<void*, size_t>> blocks;
  for (size_t bytes : {0, 1, 511, 512, 513, 4000, 65535, 65536, 65537, 70000, 1 << 20, 3000001}) {
    for (int i = 0; i < 3; ++i) {
      void* p = a.allocate(bytes);
      const auto at = reinterpret_cast<size_t>(p);
      EXPECT_EQ(at % CachingAllocator::kAlignBytes, 0u);
      const auto next = taken.lower_bound(at);
      EXPECT_TRUE(next == taken.end() || next->first >= at + std::max(bytes, size_t(1)));
      EXPECT_TRUE(next == taken.begin() || std::prev(next)->second <= at);
      taken[at] = at + bytes;
      fill(p, 1, 1, bytes, stream_);
      blocks.emplace_back(p, bytes);
    }
  }
  synchronize(stream_);
  for (auto [p, bytes] : blocks) a.deallocate(p, bytes);
  EXPECT_EQ(a.stats().live_bytes, 0);
}

TEST_F(CudaMemory, ASteadyStepAsksTheDriverForNothing) {
  CachingAllocator a(0, 128 * kMiB);
  std::mt19937 random(1);
  std::vector<size_t> sizes;
  for (int i = 0; i < 200; ++i) sizes.push_back(random() % (i % 4 ? 3000 : 2000000));
  const auto step = [&] {
    std::vector<void*> all;
    for (size_t s : sizes) all.push_back(a.allocate(s));
    for (size_t i = 0; i < all.size(); i += 2) a.deallocate(all[i], sizes[i]);
    for (size_t i = 0; i < all.size(); i += 2) all[i] = a.allocate(sizes[i]);
    for (size_t i = 0; i < all.size(); ++i) a.deallocate(all[i], sizes[i]);
  };
  step();
  step();
  const MemoryStats warm = a.stats();
  for (int i = 0; i < 5; ++i) step();
  EXPECT_EQ(a.stats().system_calls, warm.system_calls);
  EXPECT_EQ(a.stats().system_bytes, warm.system_bytes);
  EXPECT_EQ(a.stats().live_bytes, 0);
}

TEST_F(CudaMemory, FreeNeighboursMerge) {
  CachingAllocator a(0, 32 * kMiB);
  std::vector<void*> parts;
  for (int i = 0; i < 16; ++i) parts.push_back(a.allocate(2 * kMiB));
  EXPECT_EQ(a.stats().system_bytes, int64_t(32 * kMiB));
  for (int i : {3, 1, 2, 0, 15, 13, 14, 12, 8, 10, 9, 11, 7, 5, 6, 4})
    a.deallocate(parts[size_t(i)], 2 * kMiB);
  void* whole = a.allocate(32 * kMiB);
  fill(whole, 0, 1, 32 * kMiB, stream_);
  synchronize(stream_);
  a.deallocate(whole, 32 * kMiB);
}

// What is free in pieces, none of which is large enough, is moved to where it is contiguous.
TEST_F(CudaMemory, PiecesServeALargeBlock) {
  CachingAllocator a(0, 32 * kMiB);
  std::vector<void*> parts;
  for (int i = 0; i < 8; ++i) parts.push_back(a.allocate(4 * kMiB));
  for (size_t i = 0; i < 8; i += 2) a.deallocate(parts[i], 4 * kMiB);
  void* large = a.allocate(16 * kMiB);
  fill(large, 3, 1, 16 * kMiB, stream_);
  for (size_t i = 1; i < 8; i += 2) fill(parts[i], 4, 1, 4 * kMiB, stream_);
  synchronize(stream_);
  EXPECT_EQ(a.stats().system_bytes, int64_t(32 * kMiB));
  a.deallocate(large, 16 * kMiB);
  for (size_t i = 1; i < 8; i += 2) a.deallocate(parts[i], 4 * kMiB);
}

TEST_F(CudaMemory, TheNextOwnersStreamWaitsForThoseThatStillUseABlock) {
  for (size_t bytes : {size_t(1000), 2 * kMiB}) {
    CachingAllocator a(0, 64 * kMiB);
    void* p = a.allocate(bytes);
    auto event = make_ref<ManualEvent>();
    const Ref<Event> pending[] = {event};
    a.deallocate_after(p, bytes, pending);
    EXPECT_EQ(event->waits, 0);
    EXPECT_TRUE(event->waited_on.empty());
    EXPECT_EQ(a.allocate(bytes), p);
    EXPECT_EQ(event->waits, 0);
    ASSERT_EQ(event->waited_on.size(), 1u);
    EXPECT_EQ(event->waited_on[0], stream_);
    a.deallocate(p, bytes);
    EXPECT_EQ(a.allocate(bytes), p);  // waited for already
    EXPECT_EQ(event->waited_on.size(), 1u);
    EXPECT_EQ(event->use_count(), 2u);  // this test's, and `pending`
    a.deallocate(p, bytes);
  }
}

// What waits when the memory of a piece goes to a block of another size or to the driver.
TEST_F(CudaMemory, MergedAndReleasedBlocksKeepTheirUsers) {
  CachingAllocator a(0, 64 * kMiB);
  void* left = a.allocate(2 * kMiB);
  void* right = a.allocate(2 * kMiB);
  auto event = make_ref<ManualEvent>();
  const Ref<Event> pending[] = {event};
  a.deallocate_after(right, 2 * kMiB, pending);
  a.deallocate(left, 2 * kMiB);
  void* both = a.allocate(4 * kMiB);
  EXPECT_EQ(both, left);
  EXPECT_EQ(event->waited_on.size(), 1u);
  a.deallocate_after(both, 4 * kMiB, pending);
  a.release_cached();
  EXPECT_EQ(event->waits, 1);
  EXPECT_EQ(a.stats().system_bytes, 0);
  void* small = a.allocate(100);
  a.deallocate_after(small, 100, pending);
  a.release_cached();
  EXPECT_EQ(event->waits, 2);
  EXPECT_EQ(a.stats().system_bytes, 0);
}

// A kernel of the thread that freed a block may still run when another stream gets the memory.
TEST_F(CudaMemory, AnotherStreamWaitsForTheHomeStream) {
  const size_t bytes = 30 * kMiB;
  for (int round = 0; round < 5; ++round) {
    CachingAllocator a(0, 32 * kMiB);
    Stream other;
    void* p = allocate_elsewhere(a, bytes, &other);
    fill(p, 1, 1, bytes, other);
    fill(p, 2, 1, bytes, other);
    a.deallocate(p, bytes);
    Array<uint8_t> mine(a, bytes);  // the limit permits no other memory
    fill(mine.data(), 9, 1, bytes, stream_);
    EXPECT_EQ(mine.data(), p);
    const auto values = mine.read(stream_);
    EXPECT_EQ(std::count(values.begin(), values.end(), 9), ptrdiff_t(bytes));
  }
}

TEST_F(CudaMemory, SmallBlocksWaitForTheUsersOfTheirSlab) {
  CachingAllocator a(0, 4 * kMiB);
  void* all = a.allocate(4 * kMiB);
  auto event = make_ref<ManualEvent>();
  const Ref<Event> pending[] = {event};
  a.deallocate_after(all, 4 * kMiB, pending);
  void* first = a.allocate(100);
  EXPECT_EQ(event->waited_on.size(), 1u);
  void* second = a.allocate(100);
  EXPECT_EQ(event->waited_on.size(), 2u);
  void* rest = a.allocate(kMiB);
  EXPECT_EQ(event->waited_on.size(), 3u);
  a.deallocate(first, 100);
  a.deallocate(second, 100);
  a.deallocate(rest, kMiB);
}

TEST_F(CudaMemory, SmallBlocksWaitForTheHomeStreamOfTheirSlab) {
  for (int round = 0; round < 5; ++round) {
    CachingAllocator a(0, 4 * kMiB);
    Stream other;
    void* p = allocate_elsewhere(a, 4 * kMiB, &other);
    fill(p, 1, 1, 4 * kMiB, other);
    fill(p, 2, 1, 4 * kMiB, other);
    a.deallocate(p, 4 * kMiB);
    Array<uint8_t> mine(a, 60000);
    fill(mine.data(), 9, 1, mine.size(), stream_);
    EXPECT_EQ(mine.read(stream_), std::vector<uint8_t>(60000, 9));
  }
}

// Nothing uses memory any more that goes back to the driver.
TEST_F(CudaMemory, ReleasedMemoryWasWaitedFor) {
  CachingAllocator a(0, 64 * kMiB);
  for (int round = 0; round < 5; ++round) {
    void* p = a.allocate(8 * kMiB);
    for (uint32_t i = 0; i < 4; ++i) fill(p, i, 1, 8 * kMiB, stream_);
    a.deallocate(p, 8 * kMiB);
    a.release_cached();
    EXPECT_EQ(a.stats().system_bytes, 0);
    synchronize(stream_);
  }
}

// The chunk lies under blocks of two streams, so it stays mapped until the end.
TEST_F(CudaMemory, TheEndOfAnAllocatorWaitsForItsUsers) {
  for (int round = 0; round < 5; ++round) {
    {
      CachingAllocator a(0, 4 * kMiB);
      void* all = allocate_elsewhere(a, 4 * kMiB);
      a.deallocate(all, 4 * kMiB);
      void* part = a.allocate(kMiB);
      for (uint32_t i = 0; i < 4; ++i) fill(part, i, 1, kMiB, stream_);
      a.deallocate(part, kMiB);
    }
    synchronize(stream_);
  }
}

/// An event that lets go of who waits for it when the test says so.
class Gate final : public Event {
 public:
  bool done() const override { return false; }
  void wait() override { reached.release(), open.acquire(); }
  std::binary_semaphore reached{0}, open{0};
};

// What a thread gives back is neither in use nor free meanwhile; another one that needs it sleeps.
TEST_F(CudaMemory, AThreadWaitsForMemoryThatAnotherGivesBack) {
  CachingAllocator a(0, 4 * kMiB);
  const auto gate = make_ref<Gate>();
  const Ref<Event> pending[] = {gate};
  a.deallocate_after(a.allocate(4 * kMiB), 4 * kMiB, pending);
  std::thread gives([&] { a.release_cached(); });
  gate->reached.acquire();
  std::atomic<pid_t> number = 0;
  std::thread needs([&] {
    compute_stream(0);
    number = pid_t(syscall(SYS_gettid));
    a.deallocate(a.allocate(4 * kMiB), 4 * kMiB);
  });
  while (number == 0) std::this_thread::yield();
  EXPECT_TRUE(test::await_sleep(number));
  gate->open.release();
  gives.join(), needs.join();
}

TEST_F(CudaMemory, StreamsKeepToTheirOwnBlocksWhileThereIsMemory) {
  CachingAllocator a(0, 128 * kMiB);
  void* p = allocate_elsewhere(a, 2 * kMiB);
  a.deallocate(p, 2 * kMiB);
  void* mine = a.allocate(2 * kMiB);
  EXPECT_NE(mine, p);
  a.deallocate(mine, 2 * kMiB);
}

TEST_F(CudaMemory, AShortageNamesTheLargestHolders) {
  CachingAllocator a(0, 64 * kMiB);
  std::vector<std::pair<void*, size_t>> blocks;
  const auto hold = [&](const char* of, size_t bytes, MemoryUse use = MemoryUse::kActivations) {
    MemoryLabel scope(*of ? use : MemoryUse::kOther, of);
    blocks.emplace_back(a.allocate(bytes), bytes);
  };
  hold("model.h.0", 10 * kMiB);
  hold("model.h.1", 20 * kMiB);
  hold("model.h.0", 12 * kMiB);
  hold("head", 6 * kMiB, MemoryUse::kParameters);
  hold("", 1 * kMiB);
  hold("tiny", 1000);
  hold("least", 10);
  std::string error;
  {
    MemoryLabel outer(MemoryUse::kOther, "outer");
    MemoryLabel inner(MemoryUse::kGradients, "inner");
    EXPECT_THROW(a.allocate(40 * kMiB), UserError);
    error = error_of([&] { a.allocate(40 * kMiB); });
  }
  EXPECT_NE(error.find("cuda:0: out of memory: 40.0 MiB requested for gradients of inner; "),
            std::string::npos)
      << error;
  EXPECT_NE(error.find("(TESSERA_CUDA_MEMORY permits 64.0 MiB), 49.0 MiB held by tensors "
                       "(activations 42.0 MiB, parameters 6.0 MiB, other 1.0 MiB), "),
            std::string::npos)
      << error;
  EXPECT_NE(error.find("largest holders: activations of model.h.0 22.0 MiB in 2 blocks, "
                       "activations of model.h.1 20.0 MiB in 1 block, parameters of head 6.0 MiB "
                       "in 1 block, (no label) 1.0 MiB in 1 block, activations of tiny 1000 B in 1 "
                       "block; "),
            std::string::npos)
      << error;
  EXPECT_EQ(error.find('\n'), std::string::npos);
  void* fits = a.allocate(10 * kMiB);  // the state is intact
  a.deallocate(fits, 10 * kMiB);
  for (auto [p, bytes] : blocks) a.deallocate(p, bytes);
  void* now = a.allocate(40 * kMiB);
  a.deallocate(now, 40 * kMiB);
}

TEST_F(CudaMemory, AHolderMayChange) {
  const auto holders_of = [](auto* a) { return error_of([&] { a->allocate(100 * kMiB); }); };
  const auto change = [&](auto* a) {
    const size_t small = 300, large = 3 * kMiB;
    void *p = a->allocate(small), *q = a->allocate(large), *r = a->allocate(small);
    a->set_holder(p, memory_holder(MemoryUse::kParameters, "h.0"));
    a->set_holder(q, memory_holder(MemoryUse::kParameters, "h.1"));
    a->set_holder(q, memory_holder(MemoryUse::kOptimizerState, ""));
    int host = 0;
    a->set_holder(&host, memory_holder(MemoryUse::kParameters, "of the host"));
    EXPECT_NE(holders_of(a).find("largest holders: optimizer state 3.0 MiB in 1 block, (no label) "
                                 "300 B in 1 block, parameters of h.0 300 B in 1 block; "),
              std::string::npos)
        << holders_of(a);
    a->deallocate(p, small), a->deallocate(q, large);  // they leave under their last holders
    a->set_holder(q, memory_holder(MemoryUse::kParameters, "of what is free"));
    EXPECT_NE(holders_of(a).find("largest holders: (no label) 300 B in 1 block; "),
              std::string::npos)
        << holders_of(a);
    a->deallocate(r, small);
    EXPECT_EQ(a->allocations(), 3);
  };
  CachingAllocator cached(0, 64 * kMiB);
  ExactAllocator exact(0, 64 * kMiB);
  change(&cached), change(&exact);
}

// Without a limit of its own, more than the card has is refused by the driver.
TEST_F(CudaMemory, MoreThanTheCardHasIsRefused) {
  CachingAllocator a(0, 0);
  const std::string error = error_of([&] { a.allocate(properties(0).total_bytes + kMiB); });
  EXPECT_NE(error.find("out of memory"), std::string::npos) << error;
  EXPECT_EQ(a.stats().system_bytes, 0);
  ExactAllocator exact(0, 0);
  EXPECT_THROW(exact.allocate(properties(0).total_bytes + kMiB), UserError);
}

TEST_F(CudaMemory, CountsWhatIsLiveAndThePeak) {
  CachingAllocator a(0, 64 * kMiB);
  void* p = a.allocate(1000);
  void* q = a.allocate(3 * kMiB);
  EXPECT_EQ(a.stats().live_bytes, int64_t(1000 + 3 * kMiB));
  a.deallocate(q, 3 * kMiB);
  EXPECT_EQ(a.stats().live_bytes, 1000);
  EXPECT_EQ(a.stats().peak_bytes, int64_t(1000 + 3 * kMiB));
  a.reset_peak();
  EXPECT_EQ(a.stats().peak_bytes, 1000);
  EXPECT_GT(a.stats().system_bytes, 0);
  a.deallocate(p, 1000);
  a.release_cached();
  EXPECT_EQ(a.stats().system_bytes, 0);
}

TEST_F(CudaMemory, RefusesToFreeTwice) {
  CachingAllocator a(0, 64 * kMiB);
  for (size_t bytes : {size_t(100), 2 * kMiB}) {
    void* p = a.allocate(bytes);
    EXPECT_THROW(a.deallocate(p, bytes + 1), BugError);
    a.deallocate(p, bytes);
    EXPECT_THROW(a.deallocate(p, bytes), BugError);
  }
  ExactAllocator exact(0, 0);
  void* p = exact.allocate(100);
  EXPECT_THROW(exact.deallocate(p, 101), BugError);
  exact.deallocate(p, 100);
  EXPECT_THROW(exact.deallocate(p, 100), BugError);
}

/// An event that keeps a block alive, as one of a collective keeps its tensors.
class Keeper final : public Event {
 public:
  Keeper(Allocator& a, size_t bytes) : a_(a), bytes_(bytes), p_(a.allocate(bytes)) {}
  ~Keeper() override { a_.deallocate(p_, bytes_); }
  bool done() const override { return true; }
  void wait() override {}

 private:
  Allocator& a_;
  const size_t bytes_;
  void* const p_;
};

TEST_F(CudaMemory, EventsThatFreeMemoryWhenTheyEnd) {
  CachingAllocator a(0, 64 * kMiB);
  for (size_t bytes : {size_t(100), 2 * kMiB}) {
    for (int i = 0; i < 3; ++i) {
      void* p = a.allocate(bytes);
      void* q = a.allocate(bytes);
      const auto free_after = [&](void* block) {
        const Ref<Event> pending[] = {make_ref<Keeper>(a, bytes)};
        a.deallocate_after(block, bytes, pending);
      };
      free_after(p);
      free_after(q);
      if (i == 1) a.release_cached();
    }
  }
  a.release_cached();
  EXPECT_EQ(a.stats().live_bytes, 0);
}

// Threads allocate, fill and check on streams of their own while memory is short, so that blocks
// change streams and are released meanwhile.
TEST_F(CudaMemory, ManyThreadsShareACard) {
  // Each thread holds a block of 2 MiB and a slab, in chunks that others have a part of.
  CachingAllocator a(0, 64 * kMiB);
  const auto work = [&](uint32_t seed) {
    const Stream stream = compute_stream(0);
    std::mt19937 random(seed);
    for (int i = 0; i < 40; ++i) {
      const size_t n = i % 5 ? random() % 20000 : kMiB / 2;
      Array<uint32_t> array(a, n), beside(a, random() % 300);
      fill(array.data(), seed * 1000 + uint32_t(i), 4, n, stream);
      fill(beside.data(), 0, 4, beside.size(), stream);
      const std::vector<uint32_t> expected(n, seed * 1000 + uint32_t(i));
      EXPECT_EQ(array.read(stream), expected);
      if (i % 16 == 15) a.release_cached();
    }
  };
  std::vector<std::thread> threads;
  for (uint32_t t = 1; t <= 4; ++t) threads.emplace_back(work, t);
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(a.stats().live_bytes, 0);
}

TEST_F(CudaMemory, ExactBlocksAreTheDriversOwn) {
  ExactAllocator a(0, 4 * kMiB);
  void* p = a.allocate(kMiB);
  void* none = a.allocate(0);
  EXPECT_EQ(a.stats().live_bytes, int64_t(kMiB));
  EXPECT_EQ(a.stats().system_calls, 2);
  EXPECT_NE(error_of([&] { a.allocate(4 * kMiB); }).find("out of memory"), std::string::npos);
  auto event = make_ref<ManualEvent>();
  const Ref<Event> pending[] = {event};
  fill(p, 1, 1, kMiB, stream_);
  a.deallocate_after(p, kMiB, pending);  // after the fill
  EXPECT_EQ(event->waits, 1);
  a.deallocate(none, 0);
  EXPECT_EQ(a.stats().live_bytes, 0);
  EXPECT_EQ(a.stats().peak_bytes, int64_t(kMiB));
}

TEST_F(CudaMemory, PinnedBlocksComeBackWhenTheirEventsHaveHappened) {
  PinnedAllocator a;
  void* p = a.allocate(5000);
  EXPECT_TRUE(a.owns(p));
  EXPECT_TRUE(a.owns(static_cast<char*>(p) + 4999));
  EXPECT_FALSE(a.owns(&a));
  auto event = make_ref<ManualEvent>();
  const Ref<Event> pending[] = {event};
  a.deallocate_after(p, 5000, pending);
  void* q = a.allocate(6000);  // of the same class
  EXPECT_NE(q, p);
  event->happen();
  EXPECT_EQ(a.allocate(7000), p);
  a.deallocate(p, 7000);
  a.deallocate(q, 6000);
  EXPECT_EQ(a.stats().live_bytes, 0);
  EXPECT_EQ(a.stats().peak_bytes, 13000);
  EXPECT_EQ(a.stats().system_calls, 1);
  EXPECT_THROW(a.deallocate(q, 6000), BugError);
  a.release_cached();
  EXPECT_EQ(a.stats().system_bytes, 0);
  EXPECT_FALSE(a.owns(p));
}

TEST_F(CudaMemory, SmallPinnedBlocksOfAClassAreCutFromOneSlab) {
  PinnedAllocator a;
  int64_t calls = 0;
  for (const size_t bytes :
       {size_t(1), size_t(5000), size_t(70000), PinnedAllocator::kSmallBytes}) {
    std::map<char*, char*> taken;  // from, to
    for (int i = 0; i < 8; ++i) {
      auto* p = static_cast<char*>(a.allocate(bytes));
      EXPECT_EQ(reinterpret_cast<size_t>(p) % 4096, 0u);
      EXPECT_TRUE(a.owns(p) && a.owns(p + bytes - 1));
      std::memset(p, i, bytes);
      taken[p] = p + bytes;
    }
    EXPECT_EQ(a.stats().system_calls, ++calls) << bytes;
    char* end = nullptr;
    for (const auto& [from, to] : taken) {
      EXPECT_LE(end, from);
      EXPECT_EQ(*from, *(to - 1));
      end = to;
      a.deallocate(from, bytes);
    }
  }
  const int64_t before = a.stats().system_bytes;
  void* large = a.allocate(3 * kMiB);
  EXPECT_EQ(a.stats().system_bytes, before + int64_t(3 * kMiB));
  EXPECT_EQ(a.stats().system_calls, calls + 1);
  a.deallocate(large, 3 * kMiB);
}

TEST_F(CudaMemory, APinnedSlabGoesBackWhenAllItsBlocksAreFree) {
  PinnedAllocator a;
  void *p = a.allocate(5000), *q = a.allocate(5000), *other = a.allocate(100000);
  a.deallocate(p, 5000);
  a.deallocate(other, 100000);
  a.release_cached();
  EXPECT_EQ(a.stats().system_bytes, int64_t(PinnedAllocator::kSlabBytes));
  EXPECT_TRUE(a.owns(p) && a.owns(q));
  EXPECT_FALSE(a.owns(other));
  const int64_t calls = a.stats().system_calls;
  EXPECT_EQ(a.allocate(6000), p);
  EXPECT_EQ(a.stats().system_calls, calls);
  a.deallocate(p, 6000);
  a.deallocate(q, 5000);
  a.release_cached();
  EXPECT_EQ(a.stats().system_bytes, 0);
  EXPECT_FALSE(a.owns(p) || a.owns(q));
}

// Copies of blocks that lie side by side are on their way at once.
TEST_F(CudaMemory, BlocksOfAPinnedSlabAreUsedApart) {
  PinnedAllocator a;
  ExactAllocator memory(0, 0);
  SideStream side(0);
  Array<uint32_t> card(memory, 1024), elsewhere(memory, 1024);
  fill(card.data(), 1, 4, 1024, stream_);
  fill(elsewhere.data(), 2, 4, 1024, side.stream());
  auto* p = static_cast<uint32_t*>(a.allocate(4096));
  auto* q = static_cast<uint32_t*>(a.allocate(4096));
  auto* r = static_cast<uint32_t*>(a.allocate(4096));
  copy(p, kCPU, card.data(), stream_.device, 4096, stream_);
  copy(q, kCPU, elsewhere.data(), stream_.device, 4096, side.stream());
  std::fill_n(r, 1024, 3u);
  make_ref<StreamEvent>(side.stream())->wait();
  EXPECT_EQ(q[1023], 2u);
  make_ref<StreamEvent>(stream_)->wait();
  EXPECT_EQ(p[1023], 1u);
  for (uint32_t* block : {p, q, r}) a.deallocate(block, 4096);
}

// It is portable: every card copies from what was made in the context of one.
TEST_F(CudaMemory, PinnedMemoryOfOneContextServesAllCards) {
  if (device_count() < 2) GTEST_SKIP() << "one card";
  PinnedAllocator a;
  ContextHandle current = nullptr;
  std::vector<uint32_t> got;
  std::thread([&] {
    driver().set_current(context_of(1));
    auto* p = static_cast<uint32_t*>(a.allocate(4096));
    driver().get_current(&current);
    std::fill_n(p, 1024, 4u);
    for (const int card : {0, 1}) {
      ExactAllocator memory(card, 0);
      Array<uint32_t> there(memory, 1024);
      copy(there.data(), device_of(card), p, kCPU, 4096, compute_stream(card));
      got = there.read(compute_stream(card));
      EXPECT_EQ(got, std::vector<uint32_t>(1024, 4));
    }
    a.deallocate(p, 4096);
  }).join();
  EXPECT_EQ(current, context_of(1));
}

TEST_F(CudaMemory, PinnedBlocksGoBackToTheDriverAfterTheirCopies) {
  PinnedAllocator a;
  auto event = make_ref<ManualEvent>();
  const Ref<Event> pending[] = {event};
  a.deallocate_after(a.allocate(5000), 5000, pending);
  a.release_cached();
  EXPECT_EQ(event->waits, 1);
  EXPECT_EQ(a.stats().system_bytes, 0);
}

TEST_F(CudaMemory, PinnedMemoryGoesToTheCardAndBack) {
  PinnedAllocator a;
  ExactAllocator memory(0, 0);
  constexpr size_t kN = 10000;
  Array<uint32_t> card(memory, kN);
  for (uint32_t round = 0; round < 5; ++round) {
    auto* out = static_cast<uint32_t*>(a.allocate(kN * 4));
    auto* in = static_cast<uint32_t*>(a.allocate(kN * 4));
    for (uint32_t i = 0; i < kN; ++i) out[i] = i + round;
    copy(card.data(), stream_.device, out, kCPU, kN * 4, stream_);
    const Ref<Event> sent[] = {make_ref<StreamEvent>(stream_)};
    a.deallocate_after(out, kN * 4, sent);
    copy(in, kCPU, card.data(), stream_.device, kN * 4, stream_);
    make_ref<StreamEvent>(stream_)->wait();
    for (uint32_t i = 0; i < kN; ++i) ASSERT_EQ(in[i], i + round);
    a.deallocate(in, kN * 4);
  }
}

}  // namespace
}  // namespace tessera::cuda
