#include "tests/vgpu/fake/shadow.h"

#include <sys/mman.h>

#include <cstring>
#include <new>

#include "tests/vgpu/fake/gpu.h"

namespace vgpu {

namespace {
constexpr const char* kVerb[] = {"reads", "writes", "updates"};
}

Shadow::Shadow(Memory& memory) : memory_(memory) {
  void* p = mmap(nullptr, Memory::kReserved / 4 * sizeof(Word), PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  words_ = static_cast<Word*>(p);
}

void Shadow::stamp(const Op& op) {
  const auto [i, fresh] = name_numbers_.try_emplace(op.name, static_cast<uint32_t>(names_.size()));
  if (fresh) names_.push_back(op.name);
  stamps_.resize(op.number + size_t{1});
  stamps_[op.number] = {op.lane, op.clock[op.lane], i->second};
}

void Shadow::move(uintptr_t from, uintptr_t to, size_t bytes) {
  const auto word = [&](uintptr_t at) { return words_ + (at - memory_.begin()) / 4; };
  if (from != to) std::memcpy(word(to), word(from), bytes / 4 * sizeof(Word));
}

bool Shadow::ordered(uint32_t earlier, const Op& op) const {
  if (earlier == 0 || earlier == op.number) return true;
  const Stamp& s = stamps_[earlier];
  return op.clock[s.lane] >= s.time;
}

void Shadow::race(uint32_t other, const char* did, uintptr_t at, VgpuAccess kind) {
  stop(Result::kIllegalAddress, std::string("race: ") + kVerb[kind] + " " +
                                    memory_.describe(at, op_->number) + ", which '" +
                                    names_[stamps_[other].name] + "' of another stream " + did +
                                    ", and no event orders the two");
}

/// A reader, or one of a set of them, that does not happen before the op; 0 if all do.
uint32_t Shadow::unordered(uint32_t readers) const {
  if (!(readers & kSet)) return ordered(readers, *op_) ? 0 : readers;
  for (uint32_t reader : sets_[readers & ~kSet])
    if (!ordered(reader, *op_)) return reader;
  return 0;
}

// Readers that happen before this one are dropped: who is ordered behind it is behind them too.
uint32_t Shadow::add_reader(uint32_t readers) {
  const std::pair<uint32_t, uint32_t> key{op_->number, readers};
  if (last_add_ == key) return last_result_.second;
  std::vector<uint32_t> keep;
  const auto consider = [&](uint32_t reader) {
    if (!ordered(reader, *op_)) keep.push_back(reader);
  };
  if (readers & kSet)
    for (uint32_t reader : sets_[readers & ~kSet]) consider(reader);
  else
    consider(readers);
  uint32_t result = op_->number;
  if (!keep.empty()) {
    keep.push_back(op_->number);
    const auto [i, fresh] = set_numbers_.try_emplace(keep, static_cast<uint32_t>(sets_.size()));
    if (fresh) sets_.push_back(keep);
    result = kSet | i->second;
  }
  last_add_ = key, last_result_ = {0, result};
  return result;
}

// The block and the thread within one launch.
void Shadow::check_own_kernel(const Word& w, uintptr_t at, uint8_t bytes, VgpuAccess kind) {
  const Place& here = place();
  if (!here.running) return;
  const auto tell = [&](const std::string& other, const char* did) {
    stop(Result::kIllegalAddress,
         std::string("race: ") + kVerb[kind] + " " + memory_.describe(at, op_->number) +
             ", which " + other + " of the same launch " + did + ", and nothing orders the two");
  };
  const auto sees = [&](uint32_t block) { return here.atomic && has_published(block); };
  if (w.writer == op_->number && (w.writer_bytes & bytes) &&
      !(w.writer_atomic && kind == kVgpuAtomic)) {
    if (w.writer_block != here.block) {
      if (!sees(w.writer_block)) tell("block " + std::to_string(w.writer_block), "writes");
    } else if (w.writer_thread != here.thread && w.writer_thread / 32 != here.thread / 32 &&
               w.writer_barriers == static_cast<uint16_t>(here.barriers) && !w.writer_atomic) {
      tell("thread " + std::to_string(w.writer_thread), "writes");
    }
  }
  if (kind == kVgpuWrite && w.readers == op_->number && (w.reader_bytes & bytes) &&
      w.reader_block != here.block && !sees(w.reader_block))
    tell("block " + std::to_string(w.reader_block), "reads");
}

void Shadow::touch_word(Word& w, uintptr_t at, uint8_t bytes, VgpuAccess kind, const Life& life) {
  const uint32_t me = op_->number;
  if (w.writer < life.born) w.written = 0;  // of another life
  if (kind != kVgpuWrite && (w.written & bytes) != bytes)
    stop(Result::kIllegalAddress,
         "uninitialised: reads " + memory_.describe(at, me) + ", which nobody has written");
  if ((w.writer_bytes & bytes) && !ordered(w.writer, *op_)) race(w.writer, "writes", at, kind);
  if (kind != kVgpuRead && (w.reader_bytes & bytes))
    if (const uint32_t reader = unordered(w.readers)) race(reader, "reads", at, kind);
  check_own_kernel(w, at, bytes, kind);
  const Place& here = place();
  if (kind == kVgpuRead) {
    const uint32_t readers = add_reader(w.readers);
    w.reader_bytes = readers == me && w.readers != me ? bytes : w.reader_bytes | bytes;
    w.readers = readers;
    w.reader_block = static_cast<uint32_t>(here.block);
    return;
  }
  w.writer_bytes = w.writer == me ? w.writer_bytes | bytes : bytes;
  w.written |= bytes;
  w.writer = me;
  if (w.reader_bytes & bytes) w.readers = 0, w.reader_bytes = 0;
  w.writer_block = static_cast<uint32_t>(here.block);
  w.writer_thread = static_cast<uint16_t>(here.thread);
  w.writer_barriers = static_cast<uint16_t>(here.barriers);
  w.writer_atomic = kind == kVgpuAtomic;
}

// Kernels may use pinned buffers of the host too; who else does so is not known here.
void Shadow::touch(const void* p, int bytes, VgpuAccess kind) {
  const auto at = reinterpret_cast<uintptr_t>(p);
  if (!memory_.contains(at) && gpu().pinned.find(p)) return;
  touch_range(at, static_cast<size_t>(bytes), kind, op_->device);
}

void Shadow::touch_range(uintptr_t at, size_t bytes, VgpuAccess kind, int device) {
  const Life* life = nullptr;
  const std::string wrong = memory_.refuses(at, bytes, op_->number, device, &life);
  if (!wrong.empty()) stop(Result::kIllegalAddress, std::string(kVerb[kind]) + " " + wrong);
  (kind == kVgpuRead ? bytes_read : bytes_written) += bytes;
  const uintptr_t end = at + bytes;
  for (uintptr_t word = at & ~uintptr_t{3}; word < end; word += 4) {
    uint8_t mine = 0xf;
    if (word < at) mine = static_cast<uint8_t>(mine & (0xf << (at - word)));
    if (word + 4 > end) mine = static_cast<uint8_t>(mine & (0xf >> (word + 4 - end)));
    touch_word(words_[(word - memory_.begin()) / 4], std::max(at, word), mine, kind, *life);
  }
}

}  // namespace vgpu
