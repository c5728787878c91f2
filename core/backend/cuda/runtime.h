// CUDA as a kind of device: joins the parts of this folder to core/tensor/device_runtime.h.
#pragma once
#include "core/tensor/device_runtime.h"
#include "core/tensor/memory_label.h"

namespace tessera::cuda {

/// Registers the kind "cuda", once, and returns its number. Loads no library: that happens when
/// somebody asks for devices.
DeviceKind register_cuda();

/// Memory that a library allocated for tensors on a card: memory_stats() has it from now on, or no
/// longer.
void count_outside(int device, const MemoryHolder& holder, size_t bytes, bool held);

}  // namespace tessera::cuda
