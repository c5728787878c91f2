// The memory that a rank shares with its peers: allocating ranges, freeing them, mapping them
// elsewhere.
#include "collectives/shm/pool.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <string>

#include "collectives/shm/process.h"

namespace tessera::detail {
namespace {

int64_t bytes_held(const Pool& pool) {
  struct stat s {};
  fstat(pool.descriptor(), &s);
  return s.st_blocks * 512;
}

// Containers on two machines may have the same name and the same namespace number.
TEST(Process, AHostIsKnownByTheBootOfItsKernel) {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  ASSERT_TRUE(std::getline(file, boot));
  EXPECT_NE(host_identity().find(" " + boot + " pid:["), std::string::npos) << host_identity();
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
  Ref<Pool> pool = Pool::make(&why, 64 << 20);
  ASSERT_TRUE(pool) << why;
  constexpr size_t kBytes = 1 << 20;
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

constexpr size_t kHugePage = 2 << 20;

/// The bytes of huge pages in the mapping that contains `p`.
size_t huge_bytes(const void* p) {
  std::ifstream maps("/proc/self/smaps");
  bool here = false;
  for (std::string line; std::getline(maps, line);) {
    unsigned long begin = 0, end = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2)
      here = begin <= uintptr_t(p) && uintptr_t(p) < end;
    else if (here && line.starts_with("ShmemPmdMapped:"))
      return std::stoul(line.substr(line.find(':') + 1)) << 10;
  }
  return 0;
}

/// Whether the system can turn a file's small pages into huge ones (Linux 6.1).
bool collapses() {
  const int fd = memfd_create("probe", MFD_CLOEXEC);
  EXPECT_EQ(ftruncate(fd, 2 * kHugePage), 0);
  void* p = mmap(nullptr, 2 * kHugePage, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  const uintptr_t at = (uintptr_t(p) + kHugePage - 1) / kHugePage * kHugePage;
  EXPECT_NE(mmap(reinterpret_cast<void*>(at), kHugePage, PROT_READ | PROT_WRITE,
                 MAP_SHARED | MAP_FIXED, fd, 0),
            MAP_FAILED);
  *reinterpret_cast<volatile char*>(at) = 1;
  const bool done = madvise(reinterpret_cast<void*>(at), kHugePage, 25) == 0;
  munmap(p, 2 * kHugePage);
  close(fd);
  return done;
}

TEST(Pool, BlocksLieInHugePages) {
  if (!collapses()) GTEST_SKIP() << "this system makes no huge pages of files";
  std::string why;
  Ref<Pool> pool = Pool::make(&why, 64 << 20);
  ASSERT_TRUE(pool) << why;
  Ref<Storage> small = pool->allocate(4096), large = pool->allocate(5 << 20);
  std::memset(large->data(), 1, 5 << 20);
  EXPECT_EQ(huge_bytes(pool->data()), 3 * kHugePage) << "the first of them under the small one too";
  PoolView peer(getpid(), pool->descriptor(), pool->size(), &why);
  ASSERT_TRUE(peer.data()) << why;
  EXPECT_EQ(int(peer.data()[pool->offset_of(large->data(), 1) + 4'000'000]), 1);
  EXPECT_GE(huge_bytes(peer.data()), kHugePage);
  // A page goes with the last of its blocks, and is made again.
  large.reset();
  EXPECT_EQ(bytes_held(*pool), int64_t(kHugePage));
  EXPECT_EQ(huge_bytes(pool->data()), kHugePage);
  Ref<Storage> again = pool->allocate(3 << 20);
  std::memset(again->data(), 1, 3 << 20);
  EXPECT_EQ(huge_bytes(pool->data()), 2 * kHugePage);
  small.reset();
  EXPECT_EQ(bytes_held(*pool), int64_t(2 * kHugePage));
  again.reset();
  EXPECT_EQ(bytes_held(*pool), 0);
}

// A rank with only small blocks, such as those of a group that only has barriers, needs no huge
// page.
TEST(Pool, SmallBlocksAreSmall) {
  std::string why;
  Ref<Pool> pool = Pool::make(&why, 64 << 20);
  ASSERT_TRUE(pool) << why;
  Ref<Storage> small = pool->allocate(4096);
  std::memset(small->data(), 1, 4096);
  EXPECT_EQ(bytes_held(*pool), 4096);
  small.reset();
  EXPECT_EQ(bytes_held(*pool), 0);
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
