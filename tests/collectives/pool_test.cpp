// The memory that a rank shares with its peers: ranges, their return, another mapping of them.
#include "collectives/shm/pool.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>

#include "collectives/shm/process.h"

namespace tessera::detail {
namespace {

int64_t bytes_held(const Pool& pool) {
  struct stat s {};
  fstat(pool.descriptor(), &s);
  return s.st_blocks * 512;
}

TEST(Process, ThatCannotBeLookedAtHasNotEnded) {
  const uint64_t started = process_start(getpid());
  EXPECT_FALSE(process_ended(getpid(), started));
  EXPECT_TRUE(process_ended(getpid(), started - 1));  // another one had this number
  const pid_t child = fork();
  if (child == 0) _exit(0);
  const uint64_t of_child = process_start(child);
  waitpid(child, nullptr, 0);
  EXPECT_TRUE(process_ended(child, of_child));
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  const rlimit none{.rlim_cur = 0, .rlim_max = before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &none);
  EXPECT_EQ(process_start(getpid()), 0u);
  EXPECT_FALSE(process_ended(getpid(), started));
  EXPECT_TRUE(process_ended(child, of_child));
  setrlimit(RLIMIT_NOFILE, &before);
}

TEST(Pool, BlocksAreApartAndComeBack) {
  std::string why;
  Ref<Pool> pool = Pool::make(&why);
  ASSERT_TRUE(pool) << why;
  constexpr size_t kBytes = 1'000'000;
  Ref<Storage> a = pool->allocate(kBytes), b = pool->allocate(kBytes), c = pool->allocate(1);
  EXPECT_EQ(pool->offset_of(a->data(), kBytes), 0);
  EXPECT_GE(pool->offset_of(b->data(), kBytes), int64_t(kBytes));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(c->data()) % 64, 0u);
  std::memset(a->data(), 1, kBytes);
  std::memset(b->data(), 2, kBytes);
  EXPECT_GE(bytes_held(*pool), int64_t(2 * kBytes));
  // Neighbours that are given back become one range again, in either order, without their pages.
  b.reset();
  a.reset();
  EXPECT_EQ(bytes_held(*pool), 0);
  Ref<Storage> wide = pool->allocate(2 * kBytes);
  EXPECT_EQ(pool->offset_of(wide->data(), 2 * kBytes), 0);
  c.reset();
  wide.reset();
  Ref<Storage> all = pool->allocate(pool->size());
  ASSERT_TRUE(all) << "the ranges are one again";
  EXPECT_FALSE(pool->allocate(1));
}

TEST(Pool, KnowsWhatLiesInIt) {
  std::string why;
  Ref<Pool> pool = Pool::make(&why);
  ASSERT_TRUE(pool) << why;
  std::byte outside[16];
  EXPECT_EQ(pool->offset_of(outside, 16), -1);
  std::byte* end = pool->data() + pool->size();
  EXPECT_EQ(pool->offset_of(end - 16, 16), int64_t(pool->size()) - 16);
  EXPECT_EQ(pool->offset_of(end - 16, 17), -1);
}

TEST(Pool, AStorageOutlivesThePoolsOwner) {
  std::string why;
  Ref<Pool> pool = Pool::make(&why);
  ASSERT_TRUE(pool) << why;
  Ref<Storage> s = pool->allocate(100);
  pool.reset();
  std::memset(s->data(), 7, 100);
  EXPECT_EQ(static_cast<char*>(s->data())[99], 7);
}

TEST(Pool, AViewSeesTheSameBytes) {
  std::string why;
  Ref<Pool> pool = Pool::make(&why);
  ASSERT_TRUE(pool) << why;
  Ref<Storage> s = pool->allocate(100);
  PoolView view(getpid(), pool->descriptor(), pool->size(), &why);
  ASSERT_TRUE(view.data()) << why;
  static_cast<char*>(s->data())[5] = 9;
  EXPECT_EQ(int(view.data()[pool->offset_of(s->data(), 100) + 5]), 9);
  PoolView none(getpid(), 12345, pool->size(), &why);
  EXPECT_FALSE(none.data());
  EXPECT_NE(why.find("cannot open /proc/"), std::string::npos) << why;
}

}  // namespace
}  // namespace tessera::detail
