// Memory of one rank that the other ranks of its group read and write in place.
// ProcessGroup::allocate returns it, for gradient buckets and other tensors that are sent often. It
// is one mapping without a name (memfd) as large as the machine's memory; its pages exist once they
// are touched, and peers map it whole when they first need it. Where the system can turn a file's
// small pages into huge ones (Linux 6.1), blocks beyond 64 KiB have huge pages from the start: an
// all_reduce of 16 MiB took 330 us instead of 420. A forked child shares the pool with its parent,
// so it must not write there, and what it frees stays allocated. Invariant: an offset into the pool
// means the same bytes to every rank for as long as the pool lives.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "collectives/engine.h"
#include "core/tensor/storage.h"

namespace tessera::detail {

/// The side of the rank that owns the pool.
class Pool : public RefCounted {
 public:
  /// Makes a pool of `bytes`; 0: of the size of the machine's memory. Null where the system does
  /// not give the address space (ulimit -v) or the file; `why` then says so.
  static Ref<Pool> make(std::string* why, size_t bytes = 0);
  ~Pool() override;

  /// Allocates memory, aligned to 64 bytes, that returns to the pool when the storage is destroyed.
  /// Null when the pool has no room left, and in a forked child.
  Ref<Storage> allocate(size_t bytes);
  /// The offset of [data, data + bytes) in the pool; -1 when part of it is elsewhere.
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
  std::map<size_t, size_t> free_;  // ranges by their beginning; no two are adjacent
  std::vector<bool> huge_;         // by 2 MiB of the pool: they are one huge page
  bool no_huge_ = false;           // the system has no call for it (before Linux 6.1)
};

/// The side of a peer: maps the pool of process `pid` through that process's descriptor `fd`.
class PoolView {
 public:
  PoolView() = default;
  /// data() is null when the pool cannot be reached; `why` then says so.
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
