// A storage is bytes on a device, shared by every view of them, and the only object that changes.
// Invariant: a thread waits for `ready` before it reads the bytes; before it writes them it also
// waits for their other readers (a collective that sends them, a checkpoint that has not copied
// them yet), and then it bumps `version`. On a device it is the stream of the reading kernel that
// waits, and the host does not. Work on the storage's home stream is in order by itself and leaves
// no event.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/base/ref.h"
#include "core/tensor/allocator.h"
#include "core/tensor/event.h"

namespace tessera {

class Storage;

/// How to restore bytes that are not worth keeping: by gathering a sharded weight again, or by
/// fetching what was offloaded. Autograd saves the recipe of a storage that has one, not its bytes.
class Recipe : public RefCounted {
 public:
  /// The same bytes as before, perhaps pending.
  virtual Ref<Storage> rebuild() = 0;
};

class Storage final : public RefCounted {
 public:
  /// `bytes` of uninitialised memory of `allocator`, which is one of `device`; none at all for a
  /// meta device (data() is null). The calling thread's stream there becomes the home stream.
  Storage(size_t bytes, Device device, Allocator& allocator);
  /// Borrows memory; `keep_alive` is dropped when the storage dies.
  Storage(void* data, size_t bytes, Device device, Ref<RefCounted> keep_alive);
  /// `bytes` without memory yet: when a thread waits for `ready`, that has to call provide(), which
  /// brings the memory.
  Storage(size_t bytes, Device device, Ref<Event> ready);
  ~Storage() override;

  static void* operator new(size_t bytes);
  static void operator delete(void* p, size_t bytes);

  /// The first byte, for the device that it is on.
  void* data() const { return data_; }
  /// Whether the host may read and write the bytes through data().
  bool host_addressable() const { return host_addressable_; }
  size_t bytes() const { return bytes_; }
  Device device() const { return device_; }
  uint32_t version() const { return version_; }
  void bump_version() { ++version_; }
  /// For a replay, whose writes were counted when they were recorded.
  void set_version(uint32_t v) { version_ = v; }

  /// Waits until pending writes (a collective in flight) have landed.
  void wait_ready() {
    if (pending()) [[unlikely]]
      wait_ready_slow();
  }
  /// Whether writes are pending; other threads may change that meanwhile (ready_lock.h).
  bool pending() const { return ready_.load(std::memory_order_acquire); }
  /// The event that they end with. Called under ready_lock() where other threads change it or wait.
  void set_ready(Ref<Event> e);
  Ref<Event> ready() const { return Ref<Event>(ready_.load(std::memory_order_relaxed)); }

  /// Waits until the bytes may be overwritten: pending writes have landed and all readers are done.
  /// Throws what a pending write failed with; a reader that failed is done reading.
  void wait_writable() {
    if (pending() || readers_) [[unlikely]]
      wait_writable_slow();
  }

  // The same for kernels on a stream. `stream` is that on which a kernel is about to run.

  /// Lets `stream` wait for pending writes, and for all that has been enqueued on the home stream
  /// where that is another one.
  void wait_ready(const Stream& stream) {
    if (pending() || !host_addressable_) [[unlikely]]
      wait_ready_on(stream);
  }
  /// As wait_ready, and for all readers.
  void wait_writable(const Stream& stream) {
    if (pending() || readers_ || !host_addressable_) [[unlikely]]
      wait_writable_on(stream);
  }
  /// Notes, once it is enqueued, a kernel on `stream` that reads the bytes or writes them.
  void used_on(const Stream& stream, bool writes) {
    if (!host_addressable_) [[unlikely]]
      note_use(stream, writes);
  }

  /// Adds a reader: the bytes are read as they are now, beyond this call and perhaps by another
  /// thread, until `done` has happened; the memory, if not the storage, is kept until then. It
  /// is called by the thread that may write the storage, as all else of a storage is.
  void add_reader(Ref<Event> done);
  /// Events of all readers that are perhaps not done yet.
  std::span<const Ref<Event>> readers() const;

  /// Lets a storage that was made without memory use that of `memory`, which it keeps alive, and
  /// take over its pending writes and its readers.
  void provide(const Ref<Storage>& memory);

  void set_recipe(Ref<Recipe> r) { recipe_ = std::move(r); }
  const Ref<Recipe>& recipe() const { return recipe_; }

  /// What autograd knows of these bytes once a recorded value was assigned to some of them
  /// (core/autograd/assigned.h). Null: each tensor on them carries its own history.
  const Ref<RefCounted>& assigned() const { return assigned_; }
  void set_assigned(Ref<RefCounted> a);
  /// Whether any storage of the process has that; if none has, no search is needed.
  static bool any_assigned() { return num_assigned_.load(std::memory_order_relaxed) != 0; }
  /// Notes that a backward keeps the values, or kept them.
  void mark_saved() {
    if (!was_saved()) saved_.store(true, std::memory_order_relaxed);
  }
  bool was_saved() const { return saved_.load(std::memory_order_relaxed); }

 private:
  struct Readers;
  void set_home();
  void free_after_use();
  void wait_ready_slow();
  void wait_writable_slow();
  void wait_ready_on(const Stream& stream);
  void wait_writable_on(const Stream& stream);
  void wait_for_users(const Stream& stream, bool readers_too);
  void note_use(const Stream& stream, bool writes);
  Stream home() const { return {device_, home_}; }

  void* data_ = nullptr;
  size_t bytes_ = 0;
  Device device_;
  bool host_addressable_ = true;
  std::atomic<bool> saved_ = false;
  uint32_t version_ = 0;
  Allocator* allocator_ = nullptr;       // null: borrowed
  std::atomic<Event*> ready_ = nullptr;  // holds a count; null: nothing is pending
  Ref<Readers> readers_;                 // null: no reader, which is what a write checks first
  void* home_ = nullptr;  // handle of the stream on which a device's memory was allocated
  Ref<Recipe> recipe_;
  Ref<RefCounted> assigned_;
  Ref<RefCounted> keep_alive_;
  // Nothing depends on it but speed.
  inline static std::atomic<int64_t> num_assigned_ = 0;
};

}  // namespace tessera
