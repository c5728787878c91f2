// The library has every function of the table: this list does not link otherwise. Beside them it
// exports what only the virtual driver has, under names of its own:
//   vgpu_memory_allocated, vgpu_memory_freed: an allocator that cuts blocks into parts tells of
//   each
//     part, in the order in which it hands them out, so that bounds and lives are those of parts.
//   vgpu_counters: how often ops of a name ran (null: kernels of any), and in checked runs what
//     they read and wrote.
//   vgpu_order: which ops come before others by streams and events, and where the host waited.
//   vgpu_submit, vgpu_current_device: for the other virtual libraries, see work.h.
//   vgpu_emulation: that this is the virtual driver, for which there is other code than for cards.
#include "tests/vgpu/cuda/api.h"
#include "tests/vgpu/cuda/work.h"

namespace tessera::cuda {

using namespace vgpu;

extern "C" {

__attribute__((used)) void* const vgpu_exported[] = {
#define FUNCTION(member, symbol, parameters) reinterpret_cast<void*>(&symbol),
#include "core/backend/cuda/driver_functions.def"
#undef FUNCTION
};

Result vgpu_memory_allocated(DevicePtr at, size_t bytes, const char* story) {
  return in_driver(__func__, [&] {
    Memory& m = gpu().memory;
    if (!bytes || m.parts().alive_around(at))
      return refuse(
          Result::kInvalidValue, "vgpu_memory_allocated",
          "no bytes, or a part that was not freed: " + m.describe(at, gpu().next_number()));
    int device = 0;
    for (uintptr_t p = at; p < at + bytes;) {  // a part may lie across several maps
      Life* block = m.blocks().alive_around(p);
      if (!block)
        return refuse(Result::kInvalidValue, "vgpu_memory_allocated", "not memory of a device");
      block->has_parts = true, device = block->device;
      p = block->begin + block->bytes;
    }
    m.parts().add({at, bytes, device, gpu().next_number(), kAlive, 0, false, false,
                   story ? story : "made by the allocator", ""});
    return Result::kSuccess;
  });
}
Result vgpu_memory_freed(DevicePtr at) {
  return in_driver(__func__, [&] {
    Memory& m = gpu().memory;
    if (!m.parts().alive_at(at))
      return refuse(
          Result::kInvalidValue, "vgpu_memory_freed",
          "a double free, or no part begins here: " + m.describe(at, gpu().next_number()));
    m.parts().end(at, gpu().next_number(), "freed by the allocator");
    return Result::kSuccess;
  });
}
Result vgpu_submit(StreamHandle stream, const Work* work) {
  return on_stream(__func__, stream, [&](StreamObject& s) {
    enqueue(s, OpKind::kKernel, work->name, [work = *work, device = s.device] {
      for (const Use& u : work.uses)
        for (size_t i = 0; i < u.count; ++i) use_range(u.at + i * u.pitch, u.bytes, u.kind, device);
      work.run();
    });
    return Result::kSuccess;
  });
}
int vgpu_current_device() {
  const ContextObject* context = current_context();
  return context ? context->device : -1;
}
const char* vgpu_emulation() { return "driver"; }
Result vgpu_counters(const char* name, unsigned long long* counters) {
  return in_driver(__func__, [&] {
    const Counters& c = name ? gpu().counters[name] : gpu().kernels;
    counters[0] = c.runs, counters[1] = c.bytes_read, counters[2] = c.bytes_written;
    return Result::kSuccess;
  });
}
// Begins to record the order of ops, where `text` is null; ends it, and gives what was recorded
// (order.h) until it begins again.
Result vgpu_order(const char** text) {
  return in_driver(__func__, [&] {
    static auto* recorded = new std::string;
    if (text && !gpu().order)
      return refuse(Result::kInvalidValue, "vgpu_order", "it was not begun");
    if (text)
      *recorded = gpu().order->text(), *text = recorded->c_str(), gpu().order = nullptr;
    else
      gpu().order = std::make_unique<Order>();
    return Result::kSuccess;
  });
}
}

}  // namespace tessera::cuda
