// The queue in which kernels run in order.
#pragma once
#include "core/tensor/device.h"

namespace tessera {

/// A queue of kernels on a device; the CPU's is the calling thread itself.
struct Stream {
  Device device;
  void* handle = nullptr;
};

}  // namespace tessera
