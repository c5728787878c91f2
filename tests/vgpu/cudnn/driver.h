// The virtual driver, as this library finds it where the program has loaded it.
#pragma once
#include "tests/vgpu/cuda/work.h"

namespace vgpu::dnn {

struct VirtualDriver {
  SubmitWork* submit;
  CurrentDevice* current_device;
};
/// Null where the program has no virtual driver.
const VirtualDriver* virtual_driver();

}  // namespace vgpu::dnn
