#include "tests/vgpu/fake/pinned.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>
#include <new>

namespace vgpu {

namespace {
bool before(const Op& a, const Op& b) { return b.clock[a.lane] >= a.clock[a.lane]; }
}  // namespace

void* Pinned::allocate(size_t bytes) {
  bytes = (bytes + 4095) & ~size_t{4095};
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  buffers_[reinterpret_cast<uintptr_t>(p)].bytes = bytes;
  return p;
}

std::string Pinned::free(void* p) {
  const auto i = buffers_.find(reinterpret_cast<uintptr_t>(p));
  if (i == buffers_.end()) return "it is no pinned buffer, or was freed before";
  if (!i->second.users.empty())
    return "'" + i->second.users[0].op->name + "' still uses it; wait for it first";
  munmap(p, i->second.bytes);
  buffers_.erase(i);
  return "";
}

Pinned::Buffer* Pinned::find(const void* p, uintptr_t* begin) {
  const auto at = reinterpret_cast<uintptr_t>(p);
  const auto next = buffers_.upper_bound(at);
  if (next == buffers_.begin()) return nullptr;
  auto& [first, buffer] = *std::prev(next);
  if (at - first >= buffer.bytes) return nullptr;
  if (begin) *begin = first;
  return &buffer;
}

void Pinned::protect(uintptr_t at, const Buffer& buffer) {
  int protection = PROT_READ | PROT_WRITE;
  for (const User& u : buffer.users) protection &= u.writes ? PROT_NONE : PROT_READ;
  mprotect(reinterpret_cast<void*>(at), buffer.bytes, protection);
}

std::string Pinned::use(const void* p, const OpRef& op, bool writes) {
  uintptr_t at;
  Buffer* buffer = find(p, &at);
  if (!buffer) return "";
  std::string race;
  for (const User& u : buffer->users)
    if ((writes || u.writes) && !before(*u.op, *op)) race = u.op->name;
  busy_ += buffer->users.empty();
  buffer->users.push_back({op, writes});
  protect(at, *buffer);
  return race;
}

void Pinned::open(const void* p) {
  uintptr_t at;
  if (Buffer* buffer = find(p, &at))
    mprotect(reinterpret_cast<void*>(at), buffer->bytes, PROT_READ | PROT_WRITE);
}
void Pinned::close(const void* p) {
  uintptr_t at;
  if (Buffer* buffer = find(p, &at)) protect(at, *buffer);
}

void Pinned::host_has_waited(const Clock& host) {
  if (!busy_) return;
  for (auto& [at, buffer] : buffers_) {
    const size_t users = buffer.users.size();
    if (!users) continue;
    std::erase_if(buffer.users, [&](const User& u) {
      return u.op->done() && host[u.op->lane] >= u.op->clock[u.op->lane];
    });
    busy_ -= buffer.users.empty();
    if (buffer.users.size() != users) protect(at, buffer);
  }
}

}  // namespace vgpu
