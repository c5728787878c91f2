// The addresses of all virtual devices: one reservation of the process, of which the device sees an
// address exactly as the host would, so that kernels run on it. Addresses of cuMemAlloc are never
// used twice and have red zones between them; ranges of cuMemAddressReserve get memory by maps.
// Inside a block an allocator may tell of parts (annotations), which do come back. Invariant: every
// block and part has a life in op numbers: an op may use it if it was submitted in between, so it
// does not matter when the op runs. The host may touch none of this memory except while an op runs.
#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tests/vgpu/device/abi.h"

namespace vgpu {

constexpr uint32_t kAlive = ~0u;

struct Life {
  uintptr_t begin = 0;
  size_t bytes = 0;
  int device = 0;
  uint32_t born = 0,
           died = kAlive;  // op numbers: the first that may use it; the first that may not
  uint64_t access = 0;     // devices that may, a bit each
  bool has_parts = false;
  bool zones = false;
  std::string story;  // who made it, or freed it
  std::string died_story;

  bool covers(uintptr_t at) const { return at - begin < bytes; }
  bool serves(uint32_t op) const { return op >= born && op < died; }
};

/// Lives that do not overlap at any one time.
class Lives {
 public:
  Life& add(Life life);
  /// The life that begins at `at` and goes on, or null.
  Life* alive_at(uintptr_t at);
  /// The life that goes on and has `at` between its ends, or null.
  Life* alive_around(uintptr_t at, size_t zone = 0);
  void end(uintptr_t at, uint32_t op, const std::string& story);
  /// The life that op `op` may use at `at`, or null. `nearest` is then what is there otherwise.
  const Life* find(uintptr_t at, uint32_t op, const Life** nearest);
  std::map<uintptr_t, Life>& alive() { return alive_; }

 private:
  static constexpr size_t kMostDead = 1 << 14;
  void forget_old();
  std::map<uintptr_t, Life> alive_;
  std::multimap<uintptr_t, Life> dead_;
  size_t most_dead_ = kMostDead;
  /// What find() found lately: kernels go back and forth between a few operands.
  const Life*& latest(uintptr_t at) { return latest_[(at >> 9) % latest_.size()]; }
  std::array<const Life*, 64> latest_{};
};

class Memory {
 public:
  static constexpr size_t kReserved = size_t{1} << 41, kZone = 256, kHuge = size_t{2} << 20;
  Memory();

  bool contains(uintptr_t at) const { return at - begin_ < kReserved; }
  bool contains(const void* p) const { return contains(reinterpret_cast<uintptr_t>(p)); }
  uintptr_t begin() const { return begin_; }

  uintptr_t allocate(size_t bytes, int device, uint64_t access, uint32_t op);
  uintptr_t reserve(size_t bytes, size_t alignment);
  /// False: it is no reservation, or something is mapped in it.
  bool unreserve(uintptr_t at, size_t bytes);
  bool is_reserved(uintptr_t at, size_t bytes) const;
  /// Memory that ops have used since number `born`, elsewhere: `content` is what was there.
  void map(uintptr_t at, size_t bytes, int device, uint32_t born, const std::vector<char>* content);
  /// `keep`: gets what was there.
  void unmap(uintptr_t at, std::vector<char>* keep);
  void free(uintptr_t at, uint32_t op);

  Lives& blocks() { return blocks_; }
  Lives& parts() { return parts_; }

  /// Opens memory to this process while an op runs; nests.
  void open() {
    if (opened_++ == 0) protect(true);
  }
  void close() {
    if (--opened_ == 0) protect(false);
  }
  /// Closed while the host's own code runs within an op.
  int suspend();
  void resume(int depth);

  /// "byte 40 of an allocation of 4000 bytes, made by cuMemAlloc".
  std::string describe(uintptr_t at, uint32_t op);
  /// Names a byte of a red zone that was written, beside the allocations that `pointers` lead to;
  /// "" where there is none.
  std::string broken_zone(const std::vector<uintptr_t>& pointers);
  /// Why op `op` of `device` may not use these bytes, or "". `life`: of the innermost that has
  /// them.
  std::string refuses(uintptr_t at, size_t bytes, uint32_t op, int device, const Life** life);

 private:
  void protect(bool open) const;
  void fill(uintptr_t at, size_t bytes, const std::vector<char>* content) const;
  void drop(uintptr_t at, size_t bytes) const;

  uintptr_t begin_ = 0, arena_end_ = 0, reserve_end_ = 0;
  Lives blocks_, parts_;
  std::map<uintptr_t, size_t> reservations_, mapped_;
  int opened_ = 0;
};

}  // namespace vgpu
