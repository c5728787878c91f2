// What the other virtual libraries ask of the virtual driver: work of theirs in a stream. They find
// the two functions in libcuda.so.1 by name, and are built from the same tree.
#pragma once
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "core/backend/cuda/driver_api.h"
#include "tests/vgpu/device/abi.h"

namespace vgpu {

/// `count` runs of `bytes`, `pitch` apart, that the work reads or writes.
struct Use {
  tessera::cuda::DevicePtr at;
  size_t bytes, pitch, count;
  VgpuAccess kind;
};
/// Counts as a kernel, and fails by its name. `uses` are checked before `run` is called: reads,
/// then writes.
struct Work {
  std::string name;
  std::vector<Use> uses;
  std::function<void()> run;
};

/// Adds the work to a stream of the current device; the driver refuses what it refuses of a launch.
using SubmitWork = tessera::cuda::Result(tessera::cuda::StreamHandle stream, const Work* work);
/// The device that is current on the calling thread; -1 where none is.
using CurrentDevice = int();

}  // namespace vgpu
