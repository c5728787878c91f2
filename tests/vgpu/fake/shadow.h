// What checked modules are told of: for each 4 bytes of device memory, who wrote them and who read
// them since. Two ops race when neither happens before the other, whatever the order was in which
// they ran. Within one launch two blocks race, or two threads with no barrier between, unless a
// block published its writes (a fence, then an atomic access) and the other one has looked (an
// atomic access of its own). Invariant: all readers that are not ordered before the latest one are
// kept, as a set that has a number.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tests/vgpu/fake/block.h"
#include "tests/vgpu/fake/memory.h"
#include "tests/vgpu/fake/op.h"

namespace vgpu {

class Shadow {
 public:
  explicit Shadow(Memory& memory);

  /// A new op; its number is its place in the order of submission.
  void stamp(const Op& op);
  /// An op begins to run: what is touched is touched by it.
  void begin(const Op& op) { op_ = &op, bytes_read = bytes_written = 0; }
  void end() { op_ = nullptr; }
  /// One access by a thread of the kernel that runs; ends the kernel if it is wrong.
  void touch(const void* at, int bytes, VgpuAccess kind);
  /// A range, by a copy or a fill, as `device` may.
  void touch_range(uintptr_t at, size_t bytes, VgpuAccess kind, int device);
  /// Memory that lay at `from` lies at `to` now, with all that is known of it.
  void move(uintptr_t from, uintptr_t to, size_t bytes);
  /// Op number `earlier` happens before `op`.
  bool ordered(uint32_t earlier, const Op& op) const;

  uint64_t bytes_read = 0, bytes_written = 0;  // by the op that runs

 private:
  struct Word {
    uint32_t writer, readers;  // op numbers, or kSet + a set of them
    uint32_t writer_block, reader_block;
    uint16_t writer_thread, writer_barriers;
    uint8_t written;                     // bytes that were written in the life of `writer`
    uint8_t writer_bytes, reader_bytes;  // of the latest access, and of the readers
    uint8_t writer_atomic;
  };
  static constexpr uint32_t kSet = 1u << 31;
  struct Stamp {
    uint32_t lane, time, name;
  };

  void touch_word(Word& word, uintptr_t at, uint8_t bytes, VgpuAccess kind, const Life& life);
  void check_own_kernel(const Word& word, uintptr_t at, uint8_t bytes, VgpuAccess kind);
  uint32_t add_reader(uint32_t readers);
  uint32_t unordered(uint32_t readers) const;
  [[noreturn]] void race(uint32_t other, const char* did, uintptr_t at, VgpuAccess kind);

  Memory& memory_;
  Word* words_ = nullptr;
  const Op* op_ = nullptr;
  std::vector<Stamp> stamps_{{}};
  std::vector<std::string> names_{""};
  std::unordered_map<std::string, uint32_t> name_numbers_;
  std::vector<std::vector<uint32_t>> sets_;
  std::map<std::vector<uint32_t>, uint32_t> set_numbers_;
  std::pair<uint32_t, uint32_t> last_add_{}, last_result_{};  // (op, readers) and what came
};

}  // namespace vgpu
