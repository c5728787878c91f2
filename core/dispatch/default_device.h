// The device of tensors that are created without one: TensorOptions starts with it, and so do
// parameters of modules. A setting of the thread; data loaders and kernels, which give a device or
// mean the host, do not ask. Invariant: it is a device that this build has.
#pragma once
#include "core/tensor/device.h"

namespace tessera {

/// The innermost DeviceScope's of this thread, else what set_default_device() said, else the CPU.
Device default_device();
/// Throws UserError for a device that this build has no kernels for.
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
