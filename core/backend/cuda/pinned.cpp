#include "core/backend/cuda/pinned.h"

#include <algorithm>
#include <bit>
#include <iterator>

#include "core/backend/cuda/capture.h"
#include "core/backend/cuda/context.h"
#include "core/backend/cuda/library.h"
#include "core/backend/cuda/memory_ledger.h"
#include "core/base/error.h"
#include "core/base/log.h"
#include "core/tensor/wait_ended.h"

namespace tessera::cuda {
namespace {

constexpr size_t kPageBytes = 4096;

// Powers of two, from 64 KiB on with seven sizes in between.
size_t class_bytes(size_t bytes) {
  if (bytes <= 16 * kPageBytes) return std::bit_ceil(std::max(bytes, kPageBytes));
  const size_t step = std::bit_floor(bytes) / 8;
  return (bytes + step - 1) / step * step;
}

bool happened(std::span<const Ref<Event>> events) {
  return std::all_of(events.begin(), events.end(), [](const auto& e) { return e->done(); });
}

}  // namespace

// Moves blocks whose copies have ended to the cache; waits for those that have not if `waits`. The
// events end after the mutex was released: what they keep alive may free blocks.
void PinnedAllocator::collect(bool waits) {
  std::vector<Freed> ended;
  {
    std::lock_guard lock(mutex_);
    const auto first = std::partition(freed_.begin(), freed_.end(), [&](const Freed& f) {
      return !waits && !happened({f.pending.begin(), f.pending.size()});
    });
    ended.assign(std::make_move_iterator(first), std::make_move_iterator(freed_.end()));
    freed_.erase(first, freed_.end());
  }
  for (const Freed& f : ended)
    for (const Ref<Event>& e : f.pending) wait_ended(*e);
  std::lock_guard lock(mutex_);
  for (const Freed& f : ended) cached_[f.bytes].push_back(f.at);
}

void* PinnedAllocator::allocate(size_t bytes) {
  collect(false);
  std::lock_guard lock(mutex_);
  auto& cached = cached_[class_bytes(bytes)];
  if (cached.empty()) add_slab(class_bytes(bytes));
  void* p = cached.back();
  cached.pop_back();
  live_[p] = bytes;
  stats_.live_bytes += int64_t(bytes);
  stats_.peak_bytes = std::max(stats_.peak_bytes, stats_.live_bytes);
  return p;
}

// The memory is portable: whose context is current when it is made does not matter.
void PinnedAllocator::add_slab(size_t block_bytes) {
  const size_t blocks = block_bytes <= kSmallBytes ? kSlabBytes / block_bytes : 1;
  const size_t bytes = blocks * block_bytes;
  void* at = nullptr;
  CurrentDevice current(device_at_hand());
  const Result r = driver().host_allocate.result(&at, bytes, unsigned(kHostAllocPortable));
  TESSERA_CHECK(r != Result::kOutOfMemory,
                "cuda: the system has no {} of memory to lock, {} are locked; lower the number "
                "of batches that are loaded ahead",
                bytes_text(bytes), bytes_text(size_t(stats_.system_bytes)));
  if (r != Result::kSuccess) raise(r, driver().host_allocate.symbol());
  slabs_[at] = bytes;
  for (size_t i = blocks; i-- > 0;)
    cached_[block_bytes].push_back(static_cast<char*>(at) + i * block_bytes);
  stats_.system_bytes += int64_t(bytes);
  ++stats_.system_calls;
}

void PinnedAllocator::deallocate_after(void* p, size_t bytes, std::span<const Ref<Event>> pending) {
  if (kept_for_graph(*this, p, bytes, pending)) return;
  std::lock_guard lock(mutex_);
  const auto found = live_.find(p);
  TESSERA_ASSERT(found != live_.end() && found->second == bytes,
                 "cuda: {} bytes of pinned memory at {} are freed twice, or with another size",
                 bytes, p);
  live_.erase(found);
  stats_.live_bytes -= int64_t(bytes);
  if (pending.empty())
    cached_[class_bytes(bytes)].push_back(p);
  else
    freed_.push_back({p, class_bytes(bytes), {pending.begin(), pending.end()}});
}

// The end where `p` points elsewhere.
PinnedAllocator::Slabs::const_iterator PinnedAllocator::slab_of(const void* p) const {
  const auto next = slabs_.upper_bound(p);
  if (next == slabs_.begin()) return slabs_.end();
  const auto slab = std::prev(next);
  const auto* begin = static_cast<const char*>(slab->first);
  return static_cast<const char*>(p) < begin + slab->second ? slab : slabs_.end();
}

bool PinnedAllocator::owns(const void* p) const {
  std::lock_guard lock(mutex_);
  return slab_of(p) != slabs_.end();
}

MemoryStats PinnedAllocator::stats() const {
  std::lock_guard lock(mutex_);
  return stats_;
}

void PinnedAllocator::release_cached() {
  collect(true);
  std::lock_guard lock(mutex_);
  Slabs idle;  // cached bytes; then the slabs that are cached as a whole
  for (const auto& [bytes, blocks] : cached_)
    for (const void* p : blocks) idle[slab_of(p)->first] += bytes;
  std::erase_if(idle, [&](const auto& slab) { return slab.second != slabs_.at(slab.first); });
  if (idle.empty()) return;
  for (auto& [bytes, blocks] : cached_)
    std::erase_if(blocks, [&](const void* p) { return idle.contains(slab_of(p)->first); });
  CurrentDevice current(device_at_hand());
  for (const auto& [at, bytes] : idle) {
    driver().host_free(const_cast<void*>(at));
    slabs_.erase(at);
    stats_.system_bytes -= int64_t(bytes);
    ++stats_.system_calls;
  }
}

PinnedAllocator::~PinnedAllocator() {
  try {
    release_cached();
  } catch (const Error& e) {
    logging::warn("cuda: pinned memory is not given back: {}", e.what());
  }
}

PinnedAllocator& pinned_allocator() {
  static PinnedAllocator& all = *new PinnedAllocator;
  return all;
}

}  // namespace tessera::cuda
