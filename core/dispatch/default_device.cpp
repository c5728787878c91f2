#include "core/dispatch/default_device.h"

#include "core/tensor/device_runtime.h"

namespace tessera {
namespace {

thread_local Device current = kCPU;

}  // namespace

Device default_device() { return current; }

void set_default_device(Device device) {
  check_device(device, "set_default_device");
  current = device;
}

DeviceScope::~DeviceScope() { current = old_; }

}  // namespace tessera
