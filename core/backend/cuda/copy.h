// Copies and fills that run on a stream. Invariant: the calling thread waits for none of them,
// except where the host's memory is not pinned: it then waits until that memory has been read or
// written.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/tensor/stream.h"

namespace tessera::cuda {

/// Copies `bytes` between the host and cards, or within one card, or between two; each pointer is
/// into the memory of the device beside it, and `stream` is one of a card that takes part.
void copy(void* to, Device to_device, const void* from, Device from_device, size_t bytes,
          const Stream& stream);

/// One side of a copy of rows: where the first begins, and how many bytes after it the next does.
template <class T>
struct Rows {
  T* at;
  Device device;  // kCPU, or the card of the stream
  size_t pitch_bytes;
};
/// Copies `height` rows of `width_bytes`.
void copy_rows(Rows<void> to, Rows<const void> from, size_t width_bytes, size_t height,
               const Stream& stream);

/// Sets `count` elements of `element_bytes` (1, 2 or 4) on the card of `stream` to the lowest bytes
/// of `value`.
void fill(void* to, uint32_t value, size_t element_bytes, size_t count, const Stream& stream);

}  // namespace tessera::cuda
