// Memory of one rank that the other ranks of its group read and write where it lies: what
// ProcessGroup::allocate gives out, for gradient buckets and whatever else travels often. It is one
// mapping without a name (memfd) as large as the machine's memory, of which pages exist once they
// are touched; peers map it whole when they first need it. Where the system makes huge pages of a
// file's small ones when asked to (Linux 6.1), blocks beyond 64 KiB lie in such from the start: an
// all_reduce of 16 MiB took 330 us instead of 420. A forked child shares it with its parent, so it
// must not write there, and what it drops stays. Invariant: an offset into the pool means the same
// bytes to every rank for as long as the pool lives.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "collectives/engine.h"
#include "core/tensor/storage.h"

namespace tessera::detail {

/// The owner's side.
class Pool : public RefCounted {
 public:
  /// Of `bytes`; 0: of the machine's memory. Null where the system does not give the addresses
  /// (ulimit -v) or the file; `why` says so.
  static Ref<Pool> make(std::string* why, size_t bytes = 0);
  ~Pool() override;

  /// Memory that returns to the pool when the storage dies, aligned to 64 bytes; null when the pool
  /// has no room left, and in a fork's child.
  Ref<Storage> allocate(size_t bytes);
  /// Where [data, data + bytes) lies in the pool; -1 when some of it is elsewhere.
  int64_t offset_of(const void* data, int64_t bytes) const {
    auto at = static_cast<const std::byte*>(data) - base_;
    return at >= 0 && at + bytes <= int64_t(size_) ? at : -1;
  }
  std::byte* data() const { return base_; }
  int descriptor() const { return fd_; }
  size_t size() const { return size_; }

 private:
  class Block;
  Pool(int fd, std::byte* base, size_t size);
  void make_huge(size_t begin, size_t end);
  void give_back(size_t begin, size_t bytes);
  void release_pages(size_t from, size_t to, size_t begin, size_t end);

  const int fd_;
  const int birth_ = forks();  // process generation
  std::byte* const base_;
  const size_t size_;
  std::mutex mutex_;
  std::map<size_t, size_t> free_;  // ranges by where they begin, none beside another
  std::vector<bool> huge_;         // of each 2 MiB of the pool: they are one page
  bool no_huge_ = false;           // the system makes none (before Linux 6.1)
};

/// A peer's side: the pool of process `pid` behind its descriptor `fd`, mapped.
class PoolView {
 public:
  PoolView() = default;
  /// data() is null when the pool cannot be reached; `why` says so.
  PoolView(int pid, int fd, size_t size, std::string* why);
  PoolView(PoolView&& other) noexcept { *this = std::move(other); }
  PoolView& operator=(PoolView&& other) noexcept;
  ~PoolView();

  std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace tessera::detail
