// Memory of a card for tensors. A block belongs to the stream of the thread that allocated it; once
// freed, it serves that stream again with no call of the driver and no wait. Blocks of at most
// kSmallBytes are cut from slabs by size class; larger ones lie in one range of addresses, where
// free neighbours merge. A freed block carries the events of those that may still use it, and the
// stream of its next owner waits for them. Invariant: no host thread waits here, except to give
// memory back to the driver.
#pragma once
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "core/backend/cuda/context.h"
#include "core/backend/cuda/memory_ledger.h"
#include "core/backend/cuda/virtual_range.h"
#include "core/base/small_vector.h"
#include "core/tensor/allocator.h"
#include "core/tensor/event.h"
#include "core/tensor/stream.h"

namespace tessera::cuda {

class CachingAllocator final : public Allocator {
 public:
  static constexpr size_t kAlignBytes = 512;
  static constexpr size_t kSmallBytes = size_t(64) << 10;
  static constexpr size_t kSlabBytes = size_t(1) << 20;
  static constexpr size_t kChunkBytes = size_t(32) << 20;  // taken from the driver at once

  /// `limit_bytes` is the most that is taken from the driver; 0: what the card has.
  CachingAllocator(int device, size_t limit_bytes);
  /// All blocks were freed. Waits for those that still use them.
  ~CachingAllocator() override;

  /// A block for the calling thread's compute stream, aligned to kAlignBytes: the smallest free one
  /// of that stream that holds it, else new memory of the driver, else what another stream freed,
  /// for which this one then waits. Where the card's memory is used up, gives back whole free
  /// chunks, which waits for those that still use them, and tries again; chunks that are free in
  /// pieces move to where a large block needs them, since addresses are not memory. Throws
  /// UserError with the largest holders where that is not enough.
  void* allocate(size_t bytes) override;
  void deallocate(void* p, size_t bytes) override { deallocate_after(p, bytes, {}); }
  void deallocate_after(void* p, size_t bytes, std::span<const Ref<Event>> pending) override;

  /// The block at `p` is `holder`'s from now on; other addresses are ignored.
  void set_holder(void* p, const MemoryHolder& holder);
  /// Memory that was allocated elsewhere for tensors counts as held, or no longer.
  void count_outside(const MemoryHolder& holder, size_t bytes, bool held);
  /// How many blocks were handed out.
  int64_t allocations() const;

  MemoryStats stats() const;
  void reset_peak();
  /// Gives cached memory back to the driver, as far as whole chunks of it are free; waits for those
  /// that still use it.
  void release_cached();

 private:
  static constexpr size_t kSizeClasses = 24;
  using Pending = SmallVector<Ref<Event>, 2>;
  struct Block;
  /// The mutex, held. Events that were dropped meanwhile end when it is let go of: what they keep
  /// alive may free memory of this allocator.
  class Lock {
   public:
    explicit Lock(CachingAllocator& owner) : owner_(owner), lock_(owner.mutex_) {}
    ~Lock() {
      if (lock_.owns_lock()) unlock();
    }
    void lock() { lock_.lock(); }
    void unlock() {
      const std::vector<Ref<Event>> dropped = std::exchange(owner_.dropped_, {});
      lock_.unlock();
    }

   private:
    CachingAllocator& owner_;
    std::unique_lock<std::mutex> lock_;
  };
  /// A block cut into equal pieces for requests of one size class.
  struct Slab {
    struct Piece {
      size_t requested = 0;
      const MemoryHolder* holder = nullptr;  // null: the piece is free
      Pending pending;
    };
    Block* block;
    size_t size_class, bytes;  // of a piece
    size_t used = 0;
    std::vector<Piece> pieces;
  };
  /// A part of the range that is in use, is a slab, or is free.
  struct Block {
    DevicePtr at = 0;
    size_t bytes = 0;      // a multiple of kAlignBytes
    size_t requested = 0;  // while in use
    StreamHandle home = nullptr;
    const MemoryHolder* holder = nullptr;
    bool free = false;
    Pending pending;  // while free: other users than the home stream
    std::unique_ptr<Slab> slab;
  };
  struct SmallestFirst {
    bool operator()(const Block* a, const Block* b) const {
      return a->bytes != b->bytes ? a->bytes < b->bytes : a->at < b->at;
    }
  };
  /// What is free, by the stream that used it last.
  struct Cache {
    std::set<Block*, SmallestFirst> blocks;
    std::vector<std::pair<Slab*, size_t>> small[kSizeClasses];  // by size class; last in, first out
  };
  /// A block that is about to be handed out, and what its new owner's stream has to wait for.
  struct Taken {
    DevicePtr at = 0;
    StreamHandle last_home = nullptr;
    Pending pending;
  };

  Stream stream_of(StreamHandle handle) const { return {device_of(device_), handle}; }
  Taken take_small(size_t bytes, StreamHandle stream, Lock& lock);
  Taken take_large(size_t bytes, StreamHandle stream, Lock& lock);
  Block& take_block(size_t bytes, StreamHandle stream, Lock& lock);
  void add_slab(size_t size_class, StreamHandle stream, Lock& lock);
  Block* best_fit(StreamHandle stream, size_t bytes);
  Block* best_fit_elsewhere(StreamHandle stream, size_t bytes);
  Block* grow(StreamHandle stream, size_t bytes);
  void move_pending(Pending& from, Pending& to);
  void cut(Block& block, size_t bytes);
  Block& put_free(Block& block);
  Block& block_with(DevicePtr at);
  void free_small(Slab& slab, DevicePtr at, size_t bytes, std::span<const Ref<Event>> pending);
  void free_empty_slabs();
  void drop_ended(Lock& lock);
  /// Gives free chunks back; false where there were none.
  bool release(Lock& lock);
  void unmap_whole_chunks(Block& block);
  [[noreturn]] void raise_shortage(size_t bytes) const;

  const int device_;
  const size_t limit_;
  mutable std::mutex mutex_;
  std::condition_variable_any released_;
  int releasing_ = 0;  // threads that give memory back
  VirtualRange range_;
  MemoryLedger ledger_;
  std::vector<Ref<Event>> dropped_;
  std::map<DevicePtr, Block> blocks_;  // all of the mapped range, by address
  std::map<StreamHandle, Cache> caches_;
};

}  // namespace tessera::cuda
