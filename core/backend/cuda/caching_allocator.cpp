#include "core/backend/cuda/caching_allocator.h"

#include <algorithm>
#include <bit>
#include <exception>
#include <utility>

#include "core/backend/cuda/capture.h"
#include "core/backend/cuda/library.h"
#include "core/backend/cuda/stream.h"
#include "core/base/error.h"
#include "core/base/log.h"
#include "core/tensor/wait_ended.h"

namespace tessera::cuda {
namespace {

// Four classes for each doubling: a piece is at most a quarter larger than what it holds.
constexpr size_t kClassesPerDoubling = 4;
constexpr size_t kChunksOfCard = 32;  // a card is taken in at least as many steps

size_t rounded(size_t bytes) {
  constexpr size_t kUnit = CachingAllocator::kAlignBytes;
  return std::max((bytes + kUnit - 1) / kUnit, size_t(1)) * kUnit;
}

/// Class 0 to 3 hold 1 to 4 units of kAlignBytes; from there on four classes double.
size_t class_of(size_t bytes) {
  const size_t units = rounded(bytes) / CachingAllocator::kAlignBytes;
  if (units <= kClassesPerDoubling) return units - 1;
  const size_t doubling = size_t(std::bit_width(units - 1)) - 3;  // units in (4 << d, 8 << d]
  return kClassesPerDoubling * (doubling + 1) + ((units - 1) >> doubling) - kClassesPerDoubling;
}
size_t bytes_of_class(size_t size_class) {
  const size_t units = size_class < kClassesPerDoubling
                           ? size_class + 1
                           : (size_class % kClassesPerDoubling + kClassesPerDoubling + 1)
                                 << (size_class / kClassesPerDoubling - 1);
  return units * CachingAllocator::kAlignBytes;
}

void wait_for(std::span<const Ref<Event>> pending) {
  for (const Ref<Event>& e : pending) wait_ended(*e);
}

}  // namespace

CachingAllocator::CachingAllocator(int device, size_t limit_bytes)
    : device_(device),
      limit_(limit_bytes),
      range_(device,
             std::min(kChunkBytes, (limit_bytes ? limit_bytes : properties(device).total_bytes) /
                                       kChunksOfCard)) {
  TESSERA_ASSERT(class_of(kSmallBytes) + 1 == kSizeClasses, "cuda: {} size classes",
                 class_of(kSmallBytes) + 1);
}

CachingAllocator::~CachingAllocator() {
  try {
    CurrentDevice current(device_);
    driver().synchronize();
    release_cached();
  } catch (const Error& e) {
    logging::warn("cuda: cached memory is not given back: {}", e.what());
  }
}

void* CachingAllocator::allocate(size_t bytes) {
  if (void* p = kept_block(*this, bytes)) return p;
  const Stream stream = allocation_stream(device_);
  Lock lock(*this);
  const Taken taken = bytes <= kSmallBytes ? take_small(bytes, handle_of(stream), lock)
                                           : take_large(bytes, handle_of(stream), lock);
  ledger_.add(MemoryLabel::holder(), bytes);
  driver().parts.allocated(taken.at, bytes, "made by the caching allocator");
  lock.unlock();  // the default wait_on of an event blocks
  if (taken.last_home != handle_of(stream))
    make_ref<StreamEvent>(stream_of(taken.last_home))->wait_on(stream);
  for (const Ref<Event>& e : taken.pending) {
    try {
      e->wait_on(stream);
    } catch (const Error&) {  // reported where the result is used
    }
  }
  note_allocated(reinterpret_cast<void*>(taken.at));
  return reinterpret_cast<void*>(taken.at);
}

CachingAllocator::Taken CachingAllocator::take_small(size_t bytes, StreamHandle stream,
                                                     Lock& lock) {
  const size_t size_class = class_of(bytes);
  while (caches_[stream].small[size_class].empty()) add_slab(size_class, stream, lock);
  auto& list = caches_[stream].small[size_class];
  const auto [slab, index] = list.back();
  list.pop_back();
  Slab::Piece& piece = slab->pieces[index];
  piece.requested = bytes;
  piece.holder = &MemoryLabel::holder();
  ++slab->used;
  return {slab->block->at + index * slab->bytes, stream, std::exchange(piece.pending, Pending())};
}

void CachingAllocator::add_slab(size_t size_class, StreamHandle stream, Lock& lock) {
  Block& block = take_block(kSlabBytes, stream, lock);
  Pending pending = std::exchange(block.pending, Pending());
  if (block.home != stream) pending.push_back(make_ref<StreamEvent>(stream_of(block.home)));
  block.home = stream;
  const size_t bytes = bytes_of_class(size_class);
  block.slab = std::make_unique<Slab>();
  Slab& slab = *block.slab;
  slab.block = &block;
  slab.size_class = size_class;
  slab.bytes = bytes;
  slab.pieces.resize(block.bytes / bytes);
  auto& list = caches_[stream].small[size_class];
  for (size_t i = slab.pieces.size(); i-- > 0;) {
    slab.pieces[i].pending = pending;
    list.emplace_back(&slab, i);
  }
}

CachingAllocator::Taken CachingAllocator::take_large(size_t bytes, StreamHandle stream,
                                                     Lock& lock) {
  Block& block = take_block(bytes, stream, lock);
  block.requested = bytes;
  block.holder = &MemoryLabel::holder();
  return {block.at, std::exchange(block.home, stream), std::exchange(block.pending, Pending())};
}

// A block that is in nobody's cache any more; its home and its pending users are as they were.
CachingAllocator::Block& CachingAllocator::take_block(size_t bytes, StreamHandle stream,
                                                      Lock& lock) {
  const size_t wanted = rounded(bytes);
  const auto search = [&] {
    Block* b = best_fit(stream, wanted);
    if (!b) b = grow(stream, wanted);
    return b ? b : best_fit_elsewhere(stream, wanted);
  };
  Block* block = search();
  while (!block) {
    // What another thread gives back is neither in use nor free until it has.
    if (releasing_ > 0)
      released_.wait(lock);
    else if (!release(lock))
      raise_shortage(bytes);
    block = search();
  }
  caches_[block->home].blocks.erase(block);
  block->free = false;
  cut(*block, wanted);
  return *block;
}

CachingAllocator::Block* CachingAllocator::best_fit(StreamHandle stream, size_t bytes) {
  Block key;
  key.bytes = bytes;
  auto& blocks = caches_[stream].blocks;
  const auto found = blocks.lower_bound(&key);
  return found == blocks.end() ? nullptr : *found;
}

CachingAllocator::Block* CachingAllocator::best_fit_elsewhere(StreamHandle stream, size_t bytes) {
  Block* best = nullptr;
  for (const auto& [other, cache] : caches_) {
    if (other == stream) continue;
    Block* found = best_fit(other, bytes);
    if (found && (!best || SmallestFirst()(found, best))) best = found;
  }
  return best;
}

// Maps as many chunks as `bytes` need, behind the last block where that is free, else in a hole.
CachingAllocator::Block* CachingAllocator::grow(StreamHandle stream, size_t bytes) {
  const size_t chunk = range_.chunk_bytes();
  size_t first = range_.end(), missing = bytes;
  const Block* last = blocks_.empty() ? nullptr : &blocks_.rbegin()->second;
  const bool extends =
      last && last->free && last->home == stream && last->at + last->bytes == range_.address(first);
  if (extends) missing -= last->bytes;  // it is too small, or there was no need to grow
  const size_t n = (missing + chunk - 1) / chunk;
  if (!extends) first = range_.find_unmapped(n);
  if (limit_ && range_.mapped_bytes() + n * chunk > limit_) return nullptr;
  if (!range_.map(first, n)) return nullptr;
  Block& block = blocks_[range_.address(first)];
  block.at = range_.address(first);
  block.bytes = n * chunk;
  block.home = stream;
  return &put_free(block);
}

// Leaves in `block`, which is in use, what holds `bytes`; the rest is free if it is of use at all.
void CachingAllocator::cut(Block& block, size_t bytes) {
  if (block.bytes - bytes <= kSmallBytes) return;
  Block& rest = blocks_[block.at + bytes];
  rest.at = block.at + bytes;
  rest.bytes = block.bytes - bytes;
  rest.home = block.home;
  rest.pending = block.pending;
  block.bytes = bytes;
  put_free(rest);
}

void CachingAllocator::move_pending(Pending& from, Pending& to) {
  for (Ref<Event>& e : from) {
    if (e->done())
      dropped_.push_back(std::move(e));
    else
      to.push_back(std::move(e));
  }
  from.clear();
}

// Puts a block into the cache of its home, merged with free neighbours of the same home.
CachingAllocator::Block& CachingAllocator::put_free(Block& block) {
  Block* merged = &block;
  Cache& cache = caches_[block.home];
  const auto merge = [&](Block& left, Block& right) {
    left.bytes += right.bytes;
    move_pending(right.pending, left.pending);
    blocks_.erase(right.at);
    merged = &left;
  };
  const auto joins = [&](const Block& left, const Block& right) {
    return left.home == right.home && left.at + left.bytes == right.at;
  };
  auto at = blocks_.find(block.at);
  if (const auto next = std::next(at);
      next != blocks_.end() && next->second.free && joins(block, next->second)) {
    cache.blocks.erase(&next->second);
    merge(block, next->second);
  }
  if (at != blocks_.begin()) {
    Block& previous = std::prev(at)->second;
    if (previous.free && joins(previous, block)) {
      cache.blocks.erase(&previous);
      merge(previous, block);
    }
  }
  merged->free = true;
  merged->holder = nullptr;
  cache.blocks.insert(merged);
  return *merged;
}

CachingAllocator::Block& CachingAllocator::block_with(DevicePtr at) {
  auto found = blocks_.upper_bound(at);
  TESSERA_ASSERT(found != blocks_.begin(), "cuda: {:#x} is not of this allocator", at);
  Block& block = std::prev(found)->second;
  TESSERA_ASSERT(at < block.at + block.bytes && !block.free,
                 "cuda: {:#x} is freed twice, or is not of this allocator", at);
  return block;
}

void CachingAllocator::deallocate_after(void* p, size_t bytes,
                                        std::span<const Ref<Event>> pending) {
  if (kept_for_graph(*this, p, bytes, pending)) return;
  const auto at = reinterpret_cast<DevicePtr>(p);
  Lock lock(*this);
  Block& block = block_with(at);
  if (block.slab) return free_small(*block.slab, at, bytes, pending);
  TESSERA_ASSERT(block.at == at && block.requested == bytes,
                 "cuda: {} bytes at {:#x} are freed, {} at {:#x} were allocated", bytes, at,
                 block.requested, block.at);
  ledger_.remove(*block.holder, bytes);
  driver().parts.freed(at, bytes);
  block.pending.append(pending.begin(), pending.end());
  put_free(block);
}

void CachingAllocator::free_small(Slab& slab, DevicePtr at, size_t bytes,
                                  std::span<const Ref<Event>> pending) {
  const size_t index = size_t(at - slab.block->at) / slab.bytes;
  Slab::Piece& piece = slab.pieces[index];
  TESSERA_ASSERT(
      piece.holder && piece.requested == bytes && at == slab.block->at + index * slab.bytes,
      "cuda: {} bytes at {:#x} are freed twice, or with another size", bytes, at);
  ledger_.remove(*piece.holder, bytes);
  driver().parts.freed(at, bytes);
  piece.holder = nullptr;
  piece.pending.append(pending.begin(), pending.end());
  --slab.used;
  caches_[slab.block->home].small[slab.size_class].emplace_back(&slab, index);
}

void CachingAllocator::set_holder(void* p, const MemoryHolder& holder) {
  const auto at = reinterpret_cast<DevicePtr>(p);
  std::lock_guard lock(mutex_);
  const auto after = blocks_.upper_bound(at);
  if (after == blocks_.begin()) return;
  Block& block = std::prev(after)->second;
  if (at >= block.at + block.bytes || block.free) return;
  Slab::Piece* piece =
      block.slab ? &block.slab->pieces[size_t(at - block.at) / block.slab->bytes] : nullptr;
  const MemoryHolder*& now = piece ? piece->holder : block.holder;
  if (now) ledger_.move(*now, holder, piece ? piece->requested : block.requested), now = &holder;
}

void CachingAllocator::free_empty_slabs() {
  for (auto at = blocks_.begin(); at != blocks_.end();) {
    Block& block = (at++)->second;
    if (!block.slab || block.slab->used) continue;
    auto& list = caches_[block.home].small[block.slab->size_class];
    std::erase_if(list, [&](const auto& entry) { return entry.first == block.slab.get(); });
    for (Slab::Piece& piece : block.slab->pieces) move_pending(piece.pending, block.pending);
    block.slab.reset();
    at = blocks_.upper_bound(put_free(block).at);
  }
}

// Lets go of events that have happened: what they keep alive may be memory of this card.
void CachingAllocator::drop_ended(Lock& lock) {
  const auto drop = [&](Pending& pending) {
    Pending before = std::exchange(pending, Pending());
    move_pending(before, pending);
  };
  for (auto& [at, block] : blocks_) {
    drop(block.pending);
    if (!block.slab) continue;
    for (Slab::Piece& piece : block.slab->pieces) drop(piece.pending);
  }
  lock.unlock();
  lock.lock();
}

// What is to be unmapped counts as in use while its users are waited for, without the lock.
bool CachingAllocator::release(Lock& lock) {
  drop_ended(lock);
  free_empty_slabs();
  std::vector<Block*> leaving;
  for (auto& [at, block] : blocks_) {
    if (!block.free) continue;
    const size_t first = range_.chunk_at(at + range_.chunk_bytes() - 1);
    if (range_.address(first) + range_.chunk_bytes() > at + block.bytes) continue;
    caches_[block.home].blocks.erase(&block);
    block.free = false;
    leaving.push_back(&block);
  }
  if (leaving.empty()) return false;
  ++releasing_;
  lock.unlock();
  std::exception_ptr failure;
  try {
    std::set<StreamHandle> homes;
    for (Block* block : leaving) {
      wait_for({block->pending.begin(), block->pending.size()});
      homes.insert(block->home);
    }
    // Memory is all that is needed here: what ops there have refused is for others to hear.
    CurrentDevice current(device_);
    for (StreamHandle home : homes) note_host_wait(), driver().stream_synchronize(home);
  } catch (...) {
    failure = std::current_exception();
  }
  lock.lock();
  for (Block* block : leaving) {
    if (failure)
      put_free(*block);
    else
      unmap_whole_chunks(*block);
  }
  --releasing_;
  released_.notify_all();
  if (failure) std::rethrow_exception(failure);
  return true;
}

// Nothing uses `block` any more.
void CachingAllocator::unmap_whole_chunks(Block& block) {
  const DevicePtr end = block.at + block.bytes;
  const size_t first = range_.chunk_at(block.at + range_.chunk_bytes() - 1);
  const size_t last = range_.chunk_at(end);
  const DevicePtr hole = range_.address(first), hole_end = range_.address(last);
  range_.unmap(first, last - first);
  for (Ref<Event>& e : block.pending) dropped_.push_back(std::move(e));
  block.pending.clear();
  if (hole_end < end) {
    Block& rest = blocks_[hole_end];
    rest.at = hole_end;
    rest.bytes = size_t(end - hole_end);
    rest.home = block.home;
    put_free(rest);
  }
  if (block.at == hole) {
    blocks_.erase(block.at);
  } else {
    block.bytes = size_t(hole - block.at);
    put_free(block);
  }
}

void CachingAllocator::release_cached() {
  Lock lock(*this);
  release(lock);
}

void CachingAllocator::raise_shortage(size_t bytes) const {
  Shortage s{device_, bytes, 0, 0, limit_};
  for (const auto& [at, block] : blocks_) {
    if (!block.free) continue;
    s.cached += block.bytes;
    s.largest_cached = std::max(s.largest_cached, block.bytes);
  }
  raise_out_of_memory(s, ledger_);
}

void CachingAllocator::count_outside(const MemoryHolder& holder, size_t bytes, bool held) {
  std::lock_guard lock(mutex_);
  held ? ledger_.add(holder, bytes) : ledger_.remove(holder, bytes);
}

MemoryStats CachingAllocator::stats() const {
  std::lock_guard lock(mutex_);
  return {ledger_.live_bytes(), ledger_.peak_bytes(), int64_t(range_.mapped_bytes()),
          range_.driver_calls()};
}

int64_t CachingAllocator::allocations() const {
  std::lock_guard lock(mutex_);
  return ledger_.allocations();
}

void CachingAllocator::reset_peak() {
  std::lock_guard lock(mutex_);
  ledger_.reset_peak();
}

}  // namespace tessera::cuda
