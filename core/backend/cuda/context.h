// The cards of this machine, each with its primary context, which is retained once and kept. Driver
// calls concern the context that is current on the calling thread; CurrentDevice makes it so and
// puts back what was there. Invariant: no function of this folder changes the context of a thread
// that has one; a thread without one keeps the first that it is given, which saves two driver calls
// for each launch.
#pragma once
#include <cstddef>
#include <string>

#include "core/backend/cuda/driver_api.h"
#include "core/tensor/device.h"

namespace tessera::cuda {

struct Properties {
  std::string name;        // "NVIDIA H200"
  std::string uuid;        // "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx", as nvidia-smi prints it
  std::string pci_bus_id;  // "0000:1B:00.0"
  size_t total_bytes = 0;
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  int warp_size = 0;
  int threads_per_multiprocessor = 0;
  size_t shared_bytes_per_block = 0;  // the most that a kernel may ask for
  size_t l2_bytes = 0;
  bool virtual_memory = false;  // whether cuMemCreate and cuMemMap work

  /// "sm_90"
  std::string architecture() const;
};

/// Card `index` as the tensors of this program name it. Throws BugError before register_cuda().
Device device_of(int index);
/// How many cards there are; 0 where why_no_driver() says why.
int device_count();
/// Throws UserError where there is no such card.
const Properties& properties(int device);
/// As DeviceRuntime::identity.
std::string identity(int device);
/// The primary context of a card. Throws UserError where there is no such card.
ContextHandle context_of(int device);
/// The card whose context is current on this thread, else the first that has a context, else 0: for
/// calls that concern no card but need a context, so that none is made for them.
int device_at_hand();
/// Whether kernels on `device` can use the memory of `peer`.
bool can_access_peer(int device, int peer);

/// The context of `device` is current on this thread while this lives.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  ContextHandle before_ = nullptr;
  bool changed_;
};

}  // namespace tessera::cuda
