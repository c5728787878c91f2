#include "tests/vgpu/fake/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>

namespace vgpu {

namespace {

constexpr unsigned char kPoison = 0xff;  // NaN in every type of float: nobody has written here
constexpr unsigned char kZoneByte = 0xfb;

void* at_address(uintptr_t at) { return reinterpret_cast<void*>(at); }
size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

}  // namespace

// ---- lives ----

Life& Lives::add(Life life) {
  latest_.fill(nullptr);
  const uintptr_t at = life.begin;
  return alive_[at] = std::move(life);
}

Life* Lives::alive_at(uintptr_t at) {
  const auto i = alive_.find(at);
  return i == alive_.end() ? nullptr : &i->second;
}

Life* Lives::alive_around(uintptr_t at, size_t zone) {
  auto next = alive_.upper_bound(at + zone);
  if (next == alive_.begin()) return nullptr;
  Life& life = std::prev(next)->second;
  return at + zone - life.begin < life.bytes + 2 * zone ? &life : nullptr;
}

void Lives::end(uintptr_t at, uint32_t op, const std::string& story) {
  latest_.fill(nullptr);
  const auto i = alive_.find(at);
  i->second.died = op, i->second.died_story = story;
  if (dead_.size() >= most_dead_) forget_old();
  dead_.emplace(at, std::move(i->second));
  alive_.erase(i);
}

// Work that is yet to run may use what died lately.
void Lives::forget_old() {
  std::vector<uint32_t> died;
  for (const auto& [at, life] : dead_) died.push_back(life.died);
  const auto middle = died.begin() + ptrdiff_t(died.size() / 2);
  std::nth_element(died.begin(), middle, died.end());
  std::erase_if(dead_, [&](const auto& d) { return d.second.died < *middle; });
  most_dead_ = std::max(kMostDead, 2 * dead_.size());  // many may have died at once
}

const Life* Lives::find(uintptr_t at, uint32_t op, const Life** nearest) {
  const Life*& known = latest(at);
  if (known && known->covers(at) && known->serves(op)) return known;
  *nearest = nullptr;
  if (Life* life = alive_around(at)) {
    if (life->serves(op)) return known = life;
    *nearest = life;
  }
  for (auto i = dead_.upper_bound(at); i != dead_.begin();) {  // the dead overlap
    const Life& life = (--i)->second;
    if (!life.covers(at)) continue;
    if (life.serves(op)) return known = &life;
    if (!*nearest || (life.died <= op && life.died > (*nearest)->died)) *nearest = &life;
  }
  return nullptr;
}

// ---- memory ----

Memory::Memory() {
  void* p = mmap(nullptr, kReserved + kHuge, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                 -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  begin_ = round_up(reinterpret_cast<uintptr_t>(p), kHuge);
  arena_end_ = begin_;
  reserve_end_ = begin_ + kReserved / 2;
  madvise(at_address(begin_), kReserved, MADV_HUGEPAGE);
}

// By huge pages: closing 64 MiB then is a matter of 32 entries.
void Memory::protect(bool open) const {
  const int protection = open ? PROT_READ | PROT_WRITE : PROT_NONE;
  if (arena_end_ > begin_)
    mprotect(at_address(begin_), round_up(arena_end_ - begin_, kHuge), protection);
  for (auto i = mapped_.begin(); i != mapped_.end();) {
    const uintptr_t from = i->first;
    uintptr_t to = from;
    for (; i != mapped_.end() && i->first == to; ++i) to += i->second;
    mprotect(at_address(from), to - from, protection);
  }
}

int Memory::suspend() {
  const int depth = opened_;
  opened_ = 0;
  protect(false);
  return depth;
}
void Memory::resume(int depth) {
  if (opened_ == 0 && depth) protect(true);
  opened_ += depth;
}

void Memory::fill(uintptr_t at, size_t bytes, const std::vector<char>* content) const {
  if (content)
    std::memcpy(at_address(at), content->data(), std::min(bytes, content->size()));
  else
    std::memset(at_address(at), kPoison, bytes);
}
void Memory::drop(uintptr_t at, size_t bytes) const {
  const uintptr_t from = round_up(at, kHuge), to = (at + bytes) / kHuge * kHuge;
  if (to > from) madvise(at_address(from), to - from, MADV_DONTNEED);
}

uintptr_t Memory::allocate(size_t bytes, int device, uint64_t access, uint32_t op) {
  const uintptr_t at = round_up(arena_end_ + kZone, 512);
  if (at + bytes + kZone > begin_ + kReserved / 2) throw std::bad_alloc();
  arena_end_ = at + bytes + kZone;
  blocks_.add({at, bytes, device, op, kAlive, access, false, true, "made by cuMemAlloc", ""});
  ++opened_, protect(true);
  std::memset(at_address(at - kZone), kZoneByte, kZone);
  fill(at, bytes, nullptr);
  std::memset(at_address(at + bytes), kZoneByte, kZone);
  close();
  return at;
}

void Memory::free(uintptr_t at, uint32_t op) {
  const size_t bytes = blocks_.alive_at(at)->bytes;
  blocks_.end(at, op, "freed by cuMemFree");
  open();
  fill(at, bytes, nullptr);  // what is read from here on is no number
  close();
  if (bytes >= 2 * kHuge) drop(at, bytes);
}

uintptr_t Memory::reserve(size_t bytes, size_t alignment) {
  // A gap behind each range: what runs over its end meets nobody's memory.
  const uintptr_t at = round_up(reserve_end_ + kHuge, std::max(alignment, kHuge));
  if (at + bytes > begin_ + kReserved) throw std::bad_alloc();
  reserve_end_ = at + bytes;
  reservations_[at] = bytes;
  return at;
}

bool Memory::is_reserved(uintptr_t at, size_t bytes) const {
  auto next = reservations_.upper_bound(at);
  if (next == reservations_.begin()) return false;
  const auto& [begin, size] = *std::prev(next);
  return at + bytes <= begin + size;
}

bool Memory::unreserve(uintptr_t at, size_t bytes) {
  const auto i = reservations_.find(at);
  if (i == reservations_.end() || i->second != bytes) return false;
  const auto mapped = mapped_.lower_bound(at);
  if (mapped != mapped_.end() && mapped->first < at + bytes) return false;
  reservations_.erase(i);
  if (at + bytes == reserve_end_) reserve_end_ = at - kHuge;  // the next range may lie here
  return true;
}

void Memory::map(uintptr_t at, size_t bytes, int device, uint32_t born,
                 const std::vector<char>* content) {
  mapped_[at] = bytes;
  blocks_.add({at, bytes, device, born, kAlive, 0, false, false, "mapped by cuMemMap", ""});
  mprotect(at_address(at), bytes, PROT_READ | PROT_WRITE);
  fill(at, bytes, content);
  if (!opened_) mprotect(at_address(at), bytes, PROT_NONE);
}

void Memory::unmap(uintptr_t at, std::vector<char>* keep) {
  const size_t bytes = mapped_.at(at);
  open();
  if (keep) keep->assign(reinterpret_cast<char*>(at), reinterpret_cast<char*>(at) + bytes);
  close();
  // Nothing waits for what is submitted: whoever comes now, comes too late.
  blocks_.end(at, blocks_.alive_at(at)->born, "unmapped by cuMemUnmap");
  mapped_.erase(at);
  mprotect(at_address(at), bytes, PROT_NONE);
  madvise(at_address(at), bytes, MADV_DONTNEED);
}

std::string Memory::broken_zone(const std::vector<uintptr_t>& pointers) {
  for (uintptr_t pointer : pointers) {
    if (!contains(pointer)) continue;
    Life* b = blocks_.alive_around(pointer, kZone);
    if (!b || !b->zones) continue;
    auto* p = reinterpret_cast<unsigned char*>(b->begin);
    for (size_t i = 0; i < kZone; ++i) {
      const bool behind = p[b->bytes + i] != kZoneByte;
      if (!behind && p[-1 - static_cast<long>(i)] == kZoneByte) continue;
      std::memset(p - kZone, kZoneByte, kZone), std::memset(p + b->bytes, kZoneByte, kZone);
      return describe(behind ? b->begin + b->bytes + i : b->begin - 1 - i, kAlive - 1);
    }
  }
  return "";
}

std::string Memory::describe(uintptr_t at, uint32_t op) {
  const Life *nearest = nullptr, *life = nullptr;
  if (const Life* block = blocks_.find(at, op, &nearest); block && block->has_parts)
    life = parts_.find(at, op, &nearest);
  else
    life = block;
  if (!life) life = nearest;
  if (!life) life = parts_.alive_around(at, kZone);
  if (!life) life = blocks_.alive_around(at, kZone);
  if (!life) return "an address that belongs to no allocation";
  const auto offset = static_cast<long>(at - life->begin);
  std::string place =
      offset < 0 ? std::to_string(-offset) + " bytes before"
      : static_cast<size_t>(offset) >= life->bytes
          ? std::to_string(static_cast<size_t>(offset) - life->bytes) + " bytes behind the end of"
          : "byte " + std::to_string(offset) + " of";
  return place + " an allocation of " + std::to_string(life->bytes) + " bytes, " +
         (life->died == kAlive ? life->story : life->died_story);
}

std::string Memory::refuses(uintptr_t at, size_t bytes, uint32_t op, int device,
                            const Life** life) {
  const Life* nearest = nullptr;
  const Life* block = blocks_.find(at, op, &nearest);
  const Life* inner = block && block->has_parts ? parts_.find(at, op, &nearest) : block;
  if (!inner) {
    if (nearest && nearest->died <= op) return "use after free: " + describe(at, op);
    if (nearest) return "used by what was submitted before it was allocated: " + describe(at, op);
    return "out of bounds: " + describe(at, op);
  }
  const uintptr_t end = inner->begin + inner->bytes;
  if (at + bytes > end) {
    // Maps that lie side by side are one piece of memory.
    if (inner == block && mapped_.contains(end) && mapped_.contains(inner->begin)) {
      const std::string rest = refuses(end, at + bytes - end, op, device, life);
      if (!rest.empty()) return rest;
      return refuses(at, end - at, op, device, life);
    }
    return "out of bounds: " + std::to_string(bytes) + " bytes at " + describe(at, op);
  }
  if (!(block->access >> device & 1))
    return "wrong device: memory of device " + std::to_string(block->device) +
           " is used by device " + std::to_string(device) +
           ", which has no access to it: " + describe(at, op);
  *life = inner;
  return "";
}

}  // namespace vgpu
