#include "tests/vgpu/cudnn/driver.h"

#include <dlfcn.h>

#include <mutex>

namespace vgpu::dnn {

// A program may ask before it loads the driver, and again afterwards.
const VirtualDriver* virtual_driver() {
  static std::mutex mutex;
  static VirtualDriver driver{};
  std::lock_guard lock(mutex);
  if (driver.submit) return &driver;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (!library) return nullptr;
  driver.current_device = reinterpret_cast<CurrentDevice*>(dlsym(library, "vgpu_current_device"));
  driver.submit = reinterpret_cast<SubmitWork*>(dlsym(library, "vgpu_submit"));
  return driver.submit ? &driver : nullptr;
}

}  // namespace vgpu::dnn
