#include "core/dispatch/default_device.h"

#include "core/base/error.h"

namespace tessera {
namespace {

thread_local Device current = kCPU;

}  // namespace

Device default_device() { return current; }

void set_default_device(Device device) {
  TESSERA_CHECK(device.kind != DeviceKind::kCUDA,
                "set_default_device: no CUDA support in this build, asked for {}; use cpu or meta",
                to_string(device));
  current = device;
}

DeviceScope::~DeviceScope() { current = old_; }

}  // namespace tessera
