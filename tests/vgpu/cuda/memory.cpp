// Memory: allocations, pinned buffers, reserved ranges and the physical memory that is mapped into
// them. A device has as much as VGPU_MEMORY says, and no more.
#include <algorithm>
#include <new>

#include "tests/vgpu/cuda/api.h"

namespace tessera::cuda {

using namespace vgpu;

namespace {

constexpr size_t kGranularity = size_t{2} << 20;

struct Physical {
  size_t bytes = 0;
  int device = 0;
  bool released = false;
  DevicePtr mapped = 0;
  DevicePtr was_mapped = 0;   // where it was before
  uint32_t born = 0;          // the first op that may have used it
  std::vector<char> content;  // while it is not mapped
};
std::map<MemoryHandle, Physical>& physical() {
  static auto* all = new std::map<MemoryHandle, Physical>;
  return *all;
}
MemoryHandle last_handle = 0;

bool take(int device, size_t bytes) {
  size_t& used = gpu().devices[static_cast<size_t>(device)].used_bytes;
  if (bytes > gpu().settings.memory_bytes - used) return false;
  used += bytes;
  return true;
}
void give_back(int device, size_t bytes) {
  gpu().devices[static_cast<size_t>(device)].used_bytes -= bytes;
}
void forget_if_unused(std::map<MemoryHandle, Physical>::iterator i) {
  if (!i->second.released || i->second.mapped) return;
  give_back(i->second.device, i->second.bytes);
  physical().erase(i);
}
Result check_properties(const char* call, const AllocationProperties& p) {
  if (p.type == kAllocationPinned && p.location.type == kLocationDevice && p.handle_types == 0 &&
      p.location.id >= 0 && p.location.id < static_cast<int>(gpu().devices.size()))
    return Result::kSuccess;
  return refuse(Result::kInvalidValue, call, "emulated is pinned memory of a device that is there");
}

}  // namespace

extern "C" {

Result cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) {
  return in_context(__func__, [&](int device) {
    *total_bytes = gpu().settings.memory_bytes;
    *free_bytes = *total_bytes - gpu().devices[static_cast<size_t>(device)].used_bytes;
    return Result::kSuccess;
  });
}
Result cuMemAlloc_v2(DevicePtr* to, size_t bytes) {
  return in_context(__func__, [&](int device) {
    if (const Result r = forbidden_in_capture("cuMemAlloc"); r != Result::kSuccess) return r;
    if (!bytes) return refuse(Result::kInvalidValue, "cuMemAlloc", "0 bytes");
    if (!take(device, bytes)) return Result::kOutOfMemory;
    uint64_t access = uint64_t{1} << device;
    for (size_t d = 0; d < gpu().devices.size(); ++d)
      if (gpu().devices[d].peers >> device & 1) access |= uint64_t{1} << d;
    *to = gpu().memory.allocate(bytes, device, access, gpu().next_number());
    return Result::kSuccess;
  });
}
// As the driver does, waits for what was submitted.
Result cuMemFree_v2(DevicePtr at) {
  return in_context(__func__, [&](int) {
    if (const Result r = forbidden_in_capture("cuMemFree"); r != Result::kSuccess) return r;
    const Life* block = gpu().memory.blocks().alive_at(at);
    if (!block || !block->zones)
      return refuse(Result::kInvalidValue, "cuMemFree",
                    "a double free, or nothing that cuMemAlloc made: " +
                        gpu().memory.describe(at, gpu().next_number()));
    gpu().drain();
    give_back(block->device, block->bytes);
    gpu().memory.free(at, gpu().next_number());
    return Result::kSuccess;
  });
}

Result cuMemHostAlloc(void** to, size_t bytes, unsigned flags) {
  return in_context(__func__, [&](int) {
    if (const Result r = forbidden_in_capture("cuMemHostAlloc"); r != Result::kSuccess) return r;
    if (!bytes || flags & ~static_cast<unsigned>(kHostAllocPortable))
      return refuse(Result::kInvalidValue, "cuMemHostAlloc",
                    "0 bytes, or flags that are not emulated");
    *to = gpu().pinned.allocate(bytes);
    return Result::kSuccess;
  });
}
Result cuMemFreeHost(void* at) {
  return in_context(__func__, [&](int) {
    if (const Result r = forbidden_in_capture("cuMemFreeHost"); r != Result::kSuccess) return r;
    const std::string why = gpu().pinned.free(at);
    return why.empty() ? Result::kSuccess : refuse(Result::kInvalidValue, "cuMemFreeHost", why);
  });
}

Result cuMemGetAllocationGranularity(size_t* bytes, const AllocationProperties* properties,
                                     int option) {
  return in_driver(__func__, [&] {
    *bytes = kGranularity;
    if (option != kGranularityMinimum && option != kGranularityRecommended)
      return refuse(Result::kInvalidValue, "cuMemGetAllocationGranularity", "no such option");
    return check_properties("cuMemGetAllocationGranularity", *properties);
  });
}
Result cuMemAddressReserve(DevicePtr* to, size_t bytes, size_t alignment, DevicePtr,
                           unsigned long long flags) {
  return in_driver(__func__, [&] {
    if (!bytes || bytes % kGranularity || flags || (alignment & (alignment - 1)))
      return refuse(Result::kInvalidValue, "cuMemAddressReserve",
                    text(bytes) + " bytes are no multiple of the granularity, or flags");
    *to = gpu().memory.reserve(bytes, alignment);
    return Result::kSuccess;
  });
}
Result cuMemAddressFree(DevicePtr at, size_t bytes) {
  return in_driver(__func__, [&] {
    return gpu().memory.unreserve(at, bytes)
               ? Result::kSuccess
               : refuse(Result::kInvalidValue, "cuMemAddressFree",
                        "not a whole range, freed before, or something is mapped in it");
  });
}
Result cuMemCreate(MemoryHandle* memory, size_t bytes, const AllocationProperties* properties,
                   unsigned long long flags) {
  return in_driver(__func__, [&] {
    if (const Result r = check_properties("cuMemCreate", *properties); r != Result::kSuccess)
      return r;
    if (!bytes || bytes % kGranularity || flags)
      return refuse(Result::kInvalidValue, "cuMemCreate",
                    text(bytes) + " bytes are no multiple of the granularity, or flags");
    const int device = properties->location.id;
    if (!take(device, bytes)) return Result::kOutOfMemory;
    *memory = ++last_handle;
    physical()[*memory] = {bytes, device, false, 0, 0, 0, {}};
    return Result::kSuccess;
  });
}
Result cuMemRelease(MemoryHandle memory) {
  return in_driver(__func__, [&] {
    const auto i = physical().find(memory);
    if (i == physical().end() || i->second.released)
      return refuse(Result::kInvalidValue, "cuMemRelease", "no memory, or released before");
    i->second.released = true;
    forget_if_unused(i);
    return Result::kSuccess;
  });
}
Result cuMemMap(DevicePtr at, size_t bytes, size_t offset, MemoryHandle memory,
                unsigned long long flags) {
  return in_driver(__func__, [&] {
    const auto i = physical().find(memory);
    if (i == physical().end() || i->second.released || flags || offset ||
        bytes != i->second.bytes || at % kGranularity || !gpu().memory.is_reserved(at, bytes))
      return refuse(Result::kInvalidValue, "cuMemMap",
                    "emulated is the whole of a memory, inside of a reserved range");
    if (i->second.mapped)
      return refuse(Result::kAlreadyMapped, "cuMemMap", "memory in two places is not emulated");
    for (uintptr_t p = at; p < at + bytes; p += kGranularity)
      if (gpu().memory.blocks().alive_around(p))
        return refuse(Result::kInvalidValue, "cuMemMap", "something is mapped there");
    Physical& m = i->second;
    if (!m.was_mapped) m.born = gpu().next_number();
    gpu().memory.map(at, bytes, m.device, m.born, m.was_mapped ? &m.content : nullptr);
    if (gpu().shadow && m.was_mapped) gpu().shadow->move(m.was_mapped, at, bytes);
    m.mapped = m.was_mapped = at, m.content = {};
    return Result::kSuccess;
  });
}
// Waits for nobody: what still uses the range fails.
Result cuMemUnmap(DevicePtr at, size_t bytes) {
  return in_driver(__func__, [&] {
    std::vector<std::map<MemoryHandle, Physical>::iterator> all;
    size_t covered = 0;
    for (auto i = physical().begin(); i != physical().end(); ++i)
      if (i->second.mapped >= at && i->second.mapped < at + bytes)
        all.push_back(i), covered += i->second.bytes;
    if (all.empty()) return Result::kSuccess;  // as cards do
    if (covered != bytes)
      return refuse(Result::kInvalidValue, "cuMemUnmap", "the range is no row of whole maps");
    for (auto i : all) {
      Physical& m = i->second;
      gpu().memory.unmap(m.mapped, m.released ? nullptr : &m.content);
      m.mapped = 0;
      forget_if_unused(i);
    }
    return Result::kSuccess;
  });
}
Result cuMemSetAccess(DevicePtr at, size_t bytes, const AccessDescription* access, size_t count) {
  return in_driver(__func__, [&] {
    for (size_t i = 0; i < count; ++i)
      if (access[i].location.type != kLocationDevice || access[i].flags != kAccessReadWrite ||
          access[i].location.id >= static_cast<int>(gpu().devices.size()))
        return refuse(Result::kInvalidValue, "cuMemSetAccess",
                      "emulated is read-write, of devices");
    size_t covered = 0;
    for (auto& [begin, block] : gpu().memory.blocks().alive())
      if (!block.zones && begin >= at && begin < at + bytes) covered += block.bytes;
    if (!bytes || covered != bytes)
      return refuse(Result::kInvalidValue, "cuMemSetAccess", "the range is no row of whole maps");
    for (auto& [begin, block] : gpu().memory.blocks().alive())
      if (!block.zones && begin >= at && begin < at + bytes)
        for (size_t i = 0; i < count; ++i) block.access |= uint64_t{1} << access[i].location.id;
    return Result::kSuccess;
  });
}
}

}  // namespace tessera::cuda
