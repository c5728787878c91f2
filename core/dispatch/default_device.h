// The device of tensors that are created without one, parameters of modules included: TensorOptions
// starts with it. It is a setting of the thread. Data loaders and kernels name their device (or
// mean the host) and do not read it. Invariant: it is a device that this process can use.
#pragma once
#include "core/tensor/device.h"

namespace tessera {

/// That of this thread's innermost DeviceScope, else the set_default_device() one, else the CPU.
Device default_device();
/// Throws UserError for a device that is not there.
void set_default_device(Device device);

/// Tensors that this thread creates in this scope are on `device`. Scopes nest. On kMeta nothing
/// takes memory.
class DeviceScope {
 public:
  explicit DeviceScope(Device device) : old_(default_device()) { set_default_device(device); }
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  Device old_;
};

}  // namespace tessera
