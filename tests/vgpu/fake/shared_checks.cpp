#include "tests/vgpu/fake/shared_checks.h"

#include <algorithm>

namespace vgpu {

void SharedChecks::begin_block(size_t bytes, uint32_t barriers) {
  first_ = barriers;
  if (words_.size() < (bytes + 3) / 4) words_.resize((bytes + 3) / 4);
}

std::string SharedChecks::touch(size_t at, int bytes, VgpuAccess kind, SharedTouch now) {
  const auto races = [&](const SharedTouch& other, uint8_t mine) {
    return (other.bytes & mine) && other.barriers == now.barriers && other.thread != now.thread &&
           (other.thread / 32 != now.thread / 32 || other.exchanges == now.exchanges);
  };
  const auto tell = [&](const char* did, const SharedTouch& other, size_t word) {
    return "race in shared memory: " + std::string(did) + " byte " + std::to_string(word * 4) +
           ", and no barrier lies between it and thread " + std::to_string(other.thread);
  };
  const size_t end = at + static_cast<size_t>(bytes);
  for (size_t word = at / 4; word * 4 < end; ++word) {
    Word& w = words_[word];
    const size_t from = std::max(at, word * 4) - word * 4,
                 to = std::min(end, word * 4 + 4) - word * 4;
    const auto mine = static_cast<uint8_t>(((1u << to) - 1) & ~((1u << from) - 1));
    now.bytes = mine;
    if (w.written_in != first_) w.written_in = first_, w.written = 0;
    if (kind != kVgpuWrite && (w.written & mine) != mine)
      return "uninitialised: reads byte " + std::to_string(word * 4) +
             " of shared memory, which the block has not written";
    if (kind != kVgpuAtomic && races(w.write, mine))
      return tell(kind == kVgpuRead ? "reads what another thread wrote at"
                                    : "writes what another thread wrote at",
                  w.write, word);
    if (kind == kVgpuWrite && (races(w.read, mine) || races(w.other_read, mine)))
      return tell("overwrites what another thread reads at",
                  races(w.read, mine) ? w.read : w.other_read, word);
    if (kind == kVgpuRead) {
      if (w.read.thread / 32 != now.thread / 32 || w.read.barriers != now.barriers)
        w.other_read = w.read;
      w.read = now;
    } else {
      w.write = now;
      w.written |= mine;
    }
  }
  return "";
}

}  // namespace vgpu
