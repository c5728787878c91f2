#include "core/tensor/storage.h"

namespace tessera {

Storage::Storage(size_t bytes, Device device, Allocator& allocator)
    : bytes_(bytes), device_(device), allocator_(&allocator) {
  if (!device.is_meta()) data_ = allocator.allocate(bytes);
}

Storage::Storage(void* data, size_t bytes, Device device, Ref<RefCounted> keep_alive)
    : data_(data), bytes_(bytes), device_(device), keep_alive_(std::move(keep_alive)) {}

Storage::Storage(size_t bytes, Device device, Ref<Event> ready)
    : bytes_(bytes), device_(device), ready_(std::move(ready)) {}

void Storage::provide(const Ref<Storage>& memory) {
  data_ = memory->data();
  ready_ = memory->ready();
  keep_alive_ = memory;
}

Storage::~Storage() {
  // A collective may still be writing: its memory must not be recycled under it.
  if (ready_ && data_) {
    try {
      ready_->wait();
    } catch (...) {  // reported where the result is used; nobody can use this one any more
    }
  }
  if (allocator_ && data_) allocator_->deallocate(data_, bytes_);
}

void* Storage::operator new(size_t bytes) { return pool_allocate(bytes); }
void Storage::operator delete(void* p, size_t bytes) { pool_deallocate(p, bytes); }

void Storage::wait_ready_slow() {
  while (ready_) {  // what was waited for may have put another event in its place
    Ref<Event> e = ready_;
    e->wait();
    if (ready_ == e) ready_.reset();
  }
}

}  // namespace tessera
