// Linked into every emulated module: its block, and how it reaches the driver. In checked modules
// (g++ -fsanitize=thread,alignment,bounds) each load and store of memory and each misuse of a
// pointer becomes a call, and those calls end here. Invariant: accesses of a thread's own stack and
// of tables are nobody's business and cost a few comparisons.
#include "device/emulate.h"

namespace {
constexpr unsigned long long kStackReach = 128 << 10;  // a fiber's stack is that large
}

extern "C" {
VgpuBlock vgpu_at;
const VgpuCalls* vgpu_call;
alignas(1024) char vgpu_dynamic[kVgpuDynamicBytes + 2 * kVgpuDynamicZone];
// The linker's bounds of the section; a module may have none.
__attribute__((weak, visibility("hidden"))) extern char __start_vgpu_shared[], __stop_vgpu_shared[];
// Made by the virtual NVRTC beside the kernels.
extern const int vgpu_checked, vgpu_kernels;

__attribute__((visibility("default"))) VgpuModule vgpu_open(const VgpuCalls* calls) {
  static VgpuCalls own;  // here, where checked kernels may read it
  own = *calls;
  vgpu_call = &own;
  return {&vgpu_at,     __start_vgpu_shared, __stop_vgpu_shared, vgpu_dynamic + kVgpuDynamicZone,
          vgpu_checked, vgpu_kernels};
}

// Where this module lies, and so its constants and the block.
__attribute__((visibility("hidden"))) extern char __ehdr_start[], _end[];

static inline __attribute__((always_inline)) void touch(void* p, int bytes, VgpuAccess kind) {
  const auto at = reinterpret_cast<unsigned long long>(p);
  const auto shared = reinterpret_cast<unsigned long long>(__start_vgpu_shared);
  const auto module = reinterpret_cast<unsigned long long>(__ehdr_start);
  const auto stack = reinterpret_cast<unsigned long long>(__builtin_frame_address(0));
  if (at - vgpu_call->heap < vgpu_call->heap_bytes ||
      at - reinterpret_cast<unsigned long long>(vgpu_dynamic) < sizeof(vgpu_dynamic) ||
      at - shared < reinterpret_cast<unsigned long long>(__stop_vgpu_shared) - shared)
    return vgpu_call->touch(p, bytes, kind);
  // Neither the thread's own stack nor the module: memory of the host, which is pinned or wrong.
  if (at - (stack - kStackReach) >= 2 * kStackReach &&
      at - module >= reinterpret_cast<unsigned long long>(_end) - module)
    vgpu_call->touch(p, bytes, kind);
}

#define HOOK(n)                                                        \
  void __tsan_read##n(void* p) { touch(p, n, kVgpuRead); }             \
  void __tsan_write##n(void* p) { touch(p, n, kVgpuWrite); }           \
  void __tsan_unaligned_read##n(void* p) { touch(p, n, kVgpuRead); }   \
  void __tsan_unaligned_write##n(void* p) { touch(p, n, kVgpuWrite); } \
  void __tsan_volatile_read##n(void* p) { touch(p, n, kVgpuRead); }    \
  void __tsan_volatile_write##n(void* p) { touch(p, n, kVgpuWrite); }
HOOK(1)
HOOK(2)
HOOK(4)
HOOK(8)
HOOK(16)
#undef HOOK
void __tsan_read_range(void* p, size_t n) { touch(p, static_cast<int>(n), kVgpuRead); }
void __tsan_write_range(void* p, size_t n) { touch(p, static_cast<int>(n), kVgpuWrite); }
void __tsan_func_entry(void*) {}
void __tsan_func_exit(void*) {}
void __tsan_init() {}

// -fsanitize=alignment,bounds calls what follows. `place` begins with the file's name, the line and
// the column.
struct Place {
  const char* file;
  unsigned line, column;
};
void __ubsan_handle_type_mismatch_v1(Place* place, unsigned long long at) {
  if (at < 4096) return;  // a null pointer, which faults by itself
  vgpu_call->stop(716, "misaligned address: the pointer is no multiple of its type's alignment",
                  static_cast<int>(place->line));
}
void __ubsan_handle_out_of_bounds(Place* place, unsigned long long) {
  vgpu_call->stop(700, "out of bounds: an index behind the end of an array",
                  static_cast<int>(place->line));
}
}
