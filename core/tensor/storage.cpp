#include "core/tensor/storage.h"

#include <algorithm>
#include <mutex>

#include "core/base/small_vector.h"
#include "core/tensor/device_runtime.h"
#include "core/tensor/ready_lock.h"

namespace tessera {

struct Storage::Readers final : RefCounted {
  SmallVector<Ref<Event>, 2> events;
};

Storage::Storage(size_t bytes, Device device, Allocator& allocator)
    : bytes_(bytes), device_(device), allocator_(&allocator) {
  if (!device.is_meta()) data_ = allocator.allocate(bytes);
  if (!device.is_cpu()) [[unlikely]]
    set_home();
}

Storage::Storage(void* data, size_t bytes, Device device, Ref<RefCounted> keep_alive)
    : data_(data), bytes_(bytes), device_(device), keep_alive_(std::move(keep_alive)) {
  if (!device.is_cpu()) [[unlikely]]
    set_home();
}

Storage::Storage(size_t bytes, Device device, Ref<Event> ready)
    : bytes_(bytes), device_(device), ready_(ready.detach()) {
  if (!device.is_cpu()) [[unlikely]]
    set_home();
}

void Storage::set_home() {
  DeviceRuntime& runtime = runtime_of(device_);
  host_addressable_ = runtime.host_addressable();
  home_ = runtime.stream(device_.index).handle;
}

void Storage::provide(const Ref<Storage>& memory) {
  data_ = memory->data(), home_ = memory->home_;
  set_ready(memory->ready());
  readers_ = memory->readers_;
  keep_alive_ = memory;
}

void Storage::set_assigned(Ref<RefCounted> a) {
  num_assigned_.fetch_add(int64_t(bool(a)) - int64_t(bool(assigned_)), std::memory_order_relaxed);
  assigned_ = std::move(a);
}

Storage::~Storage() {
  if (assigned_) [[unlikely]]
    set_assigned({});
  if (pending() || readers_) [[unlikely]]
    free_after_use();
  else if (allocator_ && data_)
    allocator_->deallocate(data_, bytes_);
}

// A collective may still be writing, or a copy reading: the memory is recycled after them.
void Storage::free_after_use() {
  SmallVector<Ref<Event>, 4> users(readers().begin(), readers().end());
  if (Ref<Event> last = ready()) users.push_back(std::move(last));
  set_ready(nullptr);
  if (!data_) return;
  if (allocator_) return allocator_->deallocate_after(data_, bytes_, users);
  for (const Ref<Event>& e : users) {
    try {
      e->wait();
    } catch (...) {  // reported where the result is used; this one is of no use any more
    }
  }
}

void* Storage::operator new(size_t bytes) { return pool_allocate(bytes); }
void Storage::operator delete(void* p, size_t bytes) { pool_deallocate(p, bytes); }

std::mutex& ready_lock() {
  static std::mutex lock;
  return lock;
}

// One thread at a time changes it, so this need not be an exchange.
void Storage::set_ready(Ref<Event> e) {
  Event* before = ready_.load(std::memory_order_relaxed);
  ready_.store(e.detach(), std::memory_order_release);
  if (before && before->release()) delete before;
}

void Storage::wait_ready_slow() {
  for (;;) {  // what was waited for may have put another event in its place
    Ref<Event> e;
    {
      std::lock_guard lock(ready_lock());
      e = ready();
    }
    if (!e) return;
    e->wait();
    std::lock_guard lock(ready_lock());
    if (ready() != e) continue;
    if (!e->done()) return;  // it is pending only for the thread that put it there
    set_ready(nullptr);
  }
}

void Storage::wait_writable_slow() {
  wait_ready();
  Ref<Readers> readers = std::exchange(readers_, nullptr);
  if (!readers) return;
  for (const Ref<Event>& e : readers->events) {
    try {
      e->wait();
    } catch (...) {  // reported where its result is used
    }
  }
}

void Storage::wait_ready_on(const Stream& stream) {
  if (host_addressable_) return wait_ready();
  wait_for_users(stream, /*readers_too=*/false);
}

void Storage::wait_writable_on(const Stream& stream) {
  if (host_addressable_) return wait_writable();
  wait_for_users(stream, /*readers_too=*/true);
}

// Several threads may read one storage, each on a stream of its own, so what they note is locked.
void Storage::wait_for_users(const Stream& stream, bool readers_too) {
  if (!readers_too && home() == stream && !pending()) return;
  for (Ref<Event> waited;;) {  // what was waited for may have put other events in its place
    SmallVector<Ref<Event>, 4> users;
    {
      std::lock_guard lock(ready_lock());
      const Ref<Event> last = ready();
      if (waited && waited == last) break;
      if (last) users.push_back(last);
      if (readers_too) users.append(readers().begin(), readers().end());
      waited = last;
    }
    for (const Ref<Event>& e : users) e->wait_on(stream);
    if (!waited) break;
  }
  if (home() != stream)
    if (const Ref<Event> e = runtime_of(device_).record(home())) e->wait_on(stream);
}

void Storage::note_use(const Stream& stream, bool writes) {
  const bool at_home = home() == stream;
  if (!writes && at_home) return;
  Ref<Event> e = at_home ? nullptr : runtime_of(device_).record(stream);
  std::lock_guard lock(ready_lock());
  if (!writes) {
    if (e) add_reader(std::move(e));
    return;
  }
  readers_ = nullptr;  // the kernel came after all others, so they are done when it is
  set_ready(std::move(e));
}

void Storage::add_reader(Ref<Event> done) {
  if (!readers_) readers_ = make_ref<Readers>();
  auto& events = readers_->events;
  auto end = std::remove_if(events.begin(), events.end(), [](auto& e) { return e->done(); });
  while (events.end() != end) events.pop_back();
  events.push_back(std::move(done));
}

std::span<const Ref<Event>> Storage::readers() const {
  if (!readers_) return {};
  return {readers_->events.begin(), readers_->events.size()};
}

}  // namespace tessera
