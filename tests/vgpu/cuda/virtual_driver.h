// The virtual driver, as another virtual library finds it where the program has loaded it.
#pragma once
#include <dlfcn.h>

#include <mutex>

#include "tests/vgpu/cuda/work.h"

namespace vgpu {

struct VirtualDriver {
  SubmitWork* submit;
  CurrentDevice* current_device;
  tessera::cuda::Result (*driver_version)(int*);
  tessera::cuda::Result (*device_attribute)(int*, tessera::cuda::DeviceAttribute, int device);
};

/// Null where the program has no virtual driver. It may ask before it loads that, and again
/// afterwards.
inline const VirtualDriver* virtual_driver() {
  static std::mutex mutex;
  static VirtualDriver driver{};
  std::lock_guard lock(mutex);
  if (driver.submit) return &driver;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (!library) return nullptr;
  driver.current_device = reinterpret_cast<CurrentDevice*>(dlsym(library, "vgpu_current_device"));
  driver.driver_version =
      reinterpret_cast<decltype(driver.driver_version)>(dlsym(library, "cuDriverGetVersion"));
  driver.device_attribute =
      reinterpret_cast<decltype(driver.device_attribute)>(dlsym(library, "cuDeviceGetAttribute"));
  driver.submit = reinterpret_cast<SubmitWork*>(dlsym(library, "vgpu_submit"));
  return driver.submit ? &driver : nullptr;
}

}  // namespace vgpu
