#include "tests/vgpu/fake/pinned.h"

#include <sys/mman.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <new>

namespace vgpu {

namespace {
constexpr uintptr_t kPageBytes = 4096;
uintptr_t page_of(uintptr_t at) { return at & ~(kPageBytes - 1); }
bool uses_page(const Pinned::User& u, uintptr_t page) {
  return u.begin < page + kPageBytes && page < u.end;
}
bool before(const Op& a, const Op& b) { return b.clock[a.lane] >= a.clock[a.lane]; }
}  // namespace

void* Pinned::allocate(size_t bytes) {
  bytes = page_of(bytes + kPageBytes - 1);
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

// The pages of [begin, end), as their users want them; neighbours that want the same in one call.
void Pinned::protect(const Buffer& buffer, uintptr_t begin, uintptr_t end) {
  const auto wanted = [&](uintptr_t page) {
    int protection = PROT_READ | PROT_WRITE;
    for (const User& u : buffer.users)
      if (uses_page(u, page)) protection &= u.writes ? PROT_NONE : PROT_READ;
    return protection;
  };
  for (uintptr_t page = page_of(begin); page < end;) {
    const uintptr_t first = page;
    const int protection = wanted(first);
    do page += kPageBytes;
    while (page < end && wanted(page) == protection);
    mprotect(reinterpret_cast<void*>(first), page - first, protection);
  }
}

std::string Pinned::use(const void* p, size_t bytes, const OpRef& op, bool writes) {
  uintptr_t at;
  Buffer* buffer = find(p, &at);
  if (!buffer) return "";
  const auto begin = reinterpret_cast<uintptr_t>(p);
  const uintptr_t end = std::min(begin + bytes, at + buffer->bytes);
  std::string race;
  for (const User& u : buffer->users)
    if (u.begin < end && begin < u.end && (writes || u.writes) && !before(*u.op, *op))
      race = u.op->name;
  busy_ += buffer->users.empty();
  buffer->users.push_back({op, begin, end, writes});
  protect(*buffer, begin, end);
  return race;
}

const Op* Pinned::user_of_page(uintptr_t at) {
  const Buffer* buffer = find(reinterpret_cast<void*>(at));
  if (!buffer) return nullptr;
  const auto user =
      std::ranges::find_if(buffer->users, [&](const User& u) { return uses_page(u, page_of(at)); });
  return user == buffer->users.end() ? nullptr : user->op.get();
}

void Pinned::open(const void* p, size_t bytes) {
  uintptr_t at;
  const Buffer* buffer = find(p, &at);
  if (!buffer) return;
  const auto begin = reinterpret_cast<uintptr_t>(p);
  const uintptr_t page = page_of(begin), end = std::min(begin + bytes, at + buffer->bytes);
  mprotect(reinterpret_cast<void*>(page), end - page, PROT_READ | PROT_WRITE);
}
void Pinned::close(const void* p, size_t bytes) {
  uintptr_t at;
  const Buffer* buffer = find(p, &at);
  const auto begin = reinterpret_cast<uintptr_t>(p);
  if (buffer) protect(*buffer, begin, std::min(begin + bytes, at + buffer->bytes));
}

// Drops the users of which `ended` says so.
template <class F>
void Pinned::drop_users(F ended) {
  if (!busy_) return;
  for (auto& [at, buffer] : buffers_) {
    const auto gone = std::ranges::stable_partition(buffer.users, std::not_fn(ended));
    if (gone.empty()) continue;
    const std::vector<User> dropped(gone.begin(), gone.end());
    buffer.users.erase(gone.begin(), gone.end());
    busy_ -= buffer.users.empty();
    for (const User& u : dropped) protect(buffer, u.begin, u.end);
  }
}

void Pinned::forget(int device) {
  drop_users([&](const User& u) { return u.op->device == device; });
}

void Pinned::host_has_waited(const Clock& host) {
  drop_users(
      [&](const User& u) { return u.op->done() && host[u.op->lane] >= u.op->clock[u.op->lane]; });
}

}  // namespace vgpu
