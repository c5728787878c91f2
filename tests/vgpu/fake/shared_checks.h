// Races in shared memory, of checked modules: who touched each word last, and how many barriers it
// had passed then. Two threads race when one of them writes and neither a barrier of the block nor,
// within a warp, an exchange lies between. Invariant: numbers of barriers never repeat, so nothing
// is cleared between blocks.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "tests/vgpu/device/abi.h"

namespace vgpu {

struct SharedTouch {
  uint32_t barriers = 0, exchanges = 0;  // passed by the block; by the warp
  uint16_t thread = 0;
  uint8_t bytes = 0;  // of the word, a bit each
};

class SharedChecks {
 public:
  /// A block of a launch with so many bytes begins after `barriers`.
  void begin_block(size_t bytes, uint32_t barriers);
  /// An access of `bytes` at `at` (an offset); "" or what is wrong.
  std::string touch(size_t at, int bytes, VgpuAccess kind, SharedTouch now);

 private:
  struct Word {
    SharedTouch write, read, other_read;  // the latest reader; one of another warp
    uint32_t written_in = 0;              // the block's first barrier number
    uint8_t written = 0;                  // bytes that the block has written
  };
  std::vector<Word> words_;
  uint32_t first_ = 0;  // barrier number of the block's beginning
};

}  // namespace vgpu
