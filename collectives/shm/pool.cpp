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

constexpr size_t kPage = 4096;
// Blocks begin at pages: no two of them share one, and streaming stores find lines whole.
size_t round_up(size_t n) { return (n + kPage - 1) / kPage * kPage; }

size_t memory_of_machine() {
  long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGE_SIZE);
  return pages > 0 && page > 0 ? round_up(size_t(pages) * size_t(page)) : size_t{1} << 36;
}

std::byte* map(int fd, size_t size) {
  void* p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  return p == MAP_FAILED ? nullptr : static_cast<std::byte*>(p);
}

}  // namespace

/// Keeps a range of the pool, and the pool, while a storage uses it.
class Pool::Block final : public RefCounted {
 public:
  Block(Ref<Pool> pool, size_t begin, size_t bytes)
      : pool_(std::move(pool)), begin_(begin), bytes_(bytes) {}
  ~Block() override { pool_->give_back(begin_, bytes_); }

 private:
  const Ref<Pool> pool_;
  const size_t begin_, bytes_;
};

Ref<Pool> Pool::make(std::string* why) {
  size_t size = memory_of_machine();
  rlimit files{};
  getrlimit(RLIMIT_FSIZE, &files);
  if (files.rlim_cur < size) {  // the system would answer with a signal
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

Pool::~Pool() {
  munmap(base_, size_);
  close(fd_);
}

Ref<Storage> Pool::allocate(size_t bytes) {
  size_t need = round_up(std::max<size_t>(bytes, 1)), begin = 0;
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
  }
  return make_ref<Storage>(base_ + begin, bytes, kCPU,
                           Ref<RefCounted>(new Block(Ref<Pool>(this), begin, need)));
}

/// Gives the pages back to the system and joins the range with its neighbours.
void Pool::give_back(size_t begin, size_t bytes) {
  if (forks() != birth_) return;
  fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(begin), off_t(bytes));
  std::lock_guard lock(mutex_);
  auto next = free_.lower_bound(begin);
  if (next != free_.end() && next->first == begin + bytes) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == begin) {
      before->second += bytes;
      return;
    }
  }
  free_[begin] = bytes;
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
