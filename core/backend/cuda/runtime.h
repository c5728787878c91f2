// CUDA as a kind of device: joins the parts of this folder to core/tensor/device_runtime.h.
#pragma once
#include "core/tensor/device_runtime.h"

namespace tessera::cuda {

/// Registers the kind "cuda", once, and returns its number. Loads no library: that happens when
/// somebody asks for devices.
DeviceKind register_cuda();

}  // namespace tessera::cuda
