#include "collectives/shm/pool.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace tessera::detail {
namespace {

constexpr size_t kPage = 4096, kHugePage = size_t(2) << 20;
constexpr size_t kSmallBytes = 64 << 10;  // blocks up to this size are not put into huge pages
size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

#ifndef MADV_COLLAPSE
constexpr int MADV_COLLAPSE = 25;  // since Linux 6.1; glibc has the name since 2.37
#endif

size_t memory_of_machine() {
  long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGE_SIZE);
  size_t bytes = pages > 0 && page > 0 ? size_t(pages) * size_t(page) : size_t{1} << 36;
  return round_up(bytes, kHugePage);
}

// Maps `fd` so that huge pages of the file and of the address space coincide; otherwise the system
// would map small pages.
std::byte* map(int fd, size_t size) {
  const size_t span = size + kHugePage;
  void* reserved =
      mmap(nullptr, span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return nullptr;
  auto* begin = static_cast<std::byte*>(reserved);
  auto* at = begin + round_up(uintptr_t(begin), kHugePage) - uintptr_t(begin);
  if (at > begin) munmap(begin, size_t(at - begin));
  munmap(at + size, size_t(begin + span - (at + size)));
  void* p = mmap(at, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd, 0);
  if (p != MAP_FAILED) return at;
  munmap(at, size);
  return nullptr;
}

}  // namespace

/// Keeps a range of the pool, and the pool itself, while a storage uses them.
class Pool::Block final : public RefCounted {
 public:
  Block(Ref<Pool> pool, size_t begin, size_t bytes)
      : pool_(std::move(pool)), begin_(begin), bytes_(bytes) {}
  ~Block() override { pool_->give_back(begin_, bytes_); }

 private:
  const Ref<Pool> pool_;
  const size_t begin_, bytes_;
};

Ref<Pool> Pool::make(std::string* why, size_t bytes) {
  const size_t size = bytes ? round_up(bytes, kHugePage) : memory_of_machine();
  rlimit files{};
  getrlimit(RLIMIT_FSIZE, &files);
  if (files.rlim_cur < size) {  // the system would send a signal
    *why = fmt::format("files are limited to {} bytes (ulimit -f)", files.rlim_cur);
    return nullptr;
  }
  int fd = memfd_create("tessera-pool", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, off_t(size)) != 0) {
    *why = fmt::format("no shared memory: {}", std::strerror(errno));
    if (fd >= 0) close(fd);
    return nullptr;
  }
  std::byte* base = map(fd, size);
  if (!base) {
    *why = fmt::format("no addresses for {} GiB: {}", size >> 30, std::strerror(errno));
    close(fd);
    return nullptr;
  }
  return Ref<Pool>(new Pool(fd, base, size));
}

Pool::Pool(int fd, std::byte* base, size_t size)
    : fd_(fd), base_(base), size_(size), huge_(size / kHugePage) {
  free_[0] = size;
}

Pool::~Pool() {
  munmap(base_, size_);
  close(fd_);
}

Ref<Storage> Pool::allocate(size_t bytes) {
  if (forks() != birth_) return nullptr;
  // Blocks begin at pages, so that no two share a page and streaming stores find whole lines.
  size_t need = round_up(std::max<size_t>(bytes, 1), kPage), begin = 0;
  {
    std::lock_guard lock(mutex_);
    auto best = free_.end();
    for (auto it = free_.begin(); it != free_.end(); ++it)
      if (it->second >= need && (best == free_.end() || it->second < best->second)) best = it;
    if (best == free_.end()) return nullptr;
    begin = best->first;
    size_t rest = best->second - need;
    free_.erase(best);
    if (rest) free_[begin + need] = rest;
    if (bytes > kSmallBytes) make_huge(begin, begin + need);
  }
  return make_ref<Storage>(base_ + begin, bytes, kCPU,
                           Ref<RefCounted>(new Block(Ref<Pool>(this), begin, need)));
}

/// Makes the pages of [begin, end) huge, where the system can.
void Pool::make_huge(size_t begin, size_t end) {
  for (size_t unit = begin / kHugePage; unit * kHugePage < end && !no_huge_; ++unit) {
    if (huge_[unit]) continue;
    std::byte* const page = base_ + unit * kHugePage;
    // The system does nothing for a range without any page, so this makes one.
    *static_cast<volatile std::byte*>(base_ + std::max(begin, unit * kHugePage)) = std::byte{0};
    huge_[unit] = madvise(page, kHugePage, MADV_COLLAPSE) == 0;
    no_huge_ = !huge_[unit] && errno == EINVAL;
  }
}

/// Returns the pages to the system and joins the range with its free neighbours.
void Pool::give_back(size_t begin, size_t bytes) {
  if (forks() != birth_) return;
  std::lock_guard lock(mutex_);
  size_t from = begin, to = begin + bytes;  // the free range that this becomes part of
  auto next = free_.lower_bound(begin);
  if (next != free_.end() && next->first == to) {
    to += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == from) {
      from = before->first;
      free_.erase(before);
    }
  }
  release_pages(from, to, begin, begin + bytes);
  free_[from] = to - from;
}

/// Returns the pages of [begin, end), which lies in the free range [from, to) and was used until
/// now. A huge page is returned as a whole, when the last block in it is.
void Pool::release_pages(size_t from, size_t to, size_t begin, size_t end) {
  const size_t first = begin / kHugePage, last = (end - 1) / kHugePage;
  if (huge_[first]) begin = first * kHugePage >= from ? first * kHugePage : (first + 1) * kHugePage;
  if (huge_[last]) end = (last + 1) * kHugePage <= to ? (last + 1) * kHugePage : last * kHugePage;
  if (begin >= end) return;
  fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(begin), off_t(end - begin));
  for (size_t unit = begin / kHugePage; unit * kHugePage < end; ++unit) huge_[unit] = false;
}

PoolView::PoolView(int pid, int fd, size_t size, std::string* why) : size_(size) {
  std::string path = fmt::format("/proc/{}/fd/{}", pid, fd);
  int door = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (door < 0) {
    *why = fmt::format("cannot open {}: {}", path, std::strerror(errno));
    return;
  }
  data_ = map(door, size);
  if (!data_) *why = fmt::format("no addresses for {} GiB: {}", size >> 30, std::strerror(errno));
  close(door);
}

PoolView& PoolView::operator=(PoolView&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

PoolView::~PoolView() {
  if (data_) munmap(data_, size_);
}

}  // namespace tessera::detail
