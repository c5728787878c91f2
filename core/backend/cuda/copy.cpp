#include "core/backend/cuda/copy.h"

#include "core/backend/cuda/context.h"
#include "core/backend/cuda/library.h"
#include "core/backend/cuda/stream.h"
#include "core/base/error.h"

namespace tessera::cuda {
namespace {

DevicePtr on_card(const void* p) { return reinterpret_cast<DevicePtr>(p); }

}  // namespace

void copy(void* to, Device to_device, const void* from, Device from_device, size_t bytes,
          const Stream& stream) {
  if (!bytes) return;
  const StreamHandle s = handle_of(stream);
  CurrentDevice current(stream.device.index);
  if (to_device.is_cpu()) {
    TESSERA_ASSERT(from_device == stream.device, "cuda: a copy from a card on another's stream");
    driver().copy_to_host(to, on_card(from), bytes, s);
  } else if (from_device.is_cpu()) {
    TESSERA_ASSERT(to_device == stream.device, "cuda: a copy to a card on another's stream");
    driver().copy_to_device(on_card(to), from, bytes, s);
  } else if (to_device == from_device) {
    driver().copy_on_device(on_card(to), on_card(from), bytes, s);
  } else {
    driver().copy_to_peer(on_card(to), context_of(to_device.index), on_card(from),
                          context_of(from_device.index), bytes, s);
  }
}

void copy_rows(Rows<void> to, Rows<const void> from, size_t width_bytes, size_t height,
               const Stream& stream) {
  if (!width_bytes || !height) return;
  CurrentDevice current(stream.device.index);
  Memcpy2D c{};
  c.source_type = from.device.is_cpu() ? kMemoryTypeHost : kMemoryTypeDevice;
  if (from.device.is_cpu())
    c.source_host = from.at;
  else
    c.source_device = on_card(from.at);
  c.source_pitch = from.pitch_bytes;
  c.target_type = to.device.is_cpu() ? kMemoryTypeHost : kMemoryTypeDevice;
  if (to.device.is_cpu())
    c.target_host = to.at;
  else
    c.target_device = on_card(to.at);
  c.target_pitch = to.pitch_bytes;
  c.width_bytes = width_bytes;
  c.height = height;
  driver().copy_2d(&c, handle_of(stream));
}

void fill(void* to, uint32_t value, size_t element_bytes, size_t count, const Stream& stream) {
  if (!count) return;
  CurrentDevice current(stream.device.index);
  const StreamHandle s = handle_of(stream);
  switch (element_bytes) {
    case 1: return driver().fill_8(on_card(to), uint8_t(value), count, s);
    case 2: return driver().fill_16(on_card(to), uint16_t(value), count, s);
    case 4: return driver().fill_32(on_card(to), value, count, s);
    default: TESSERA_ASSERT(false, "cuda: a fill with elements of {} bytes", element_bytes);
  }
}

}  // namespace tessera::cuda
