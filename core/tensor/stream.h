// The queue in which kernels run in order.
#pragma once
#include "core/tensor/device.h"

namespace tessera {

/// A queue of kernels on a device. The CPU's has no handle: it is the calling thread itself.
struct Stream {
  Device device;
  void* handle = nullptr;
  bool operator==(const Stream&) const = default;
};

}  // namespace tessera
