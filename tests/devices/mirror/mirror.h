// A kind of device called "mirror", with two devices: memory that the host cannot touch, and the
// CPU's kernels, which run later, in an order that only events bound. What runs on it with the bits
// of the CPU waits where it has to, and reads no value of a device behind its back. MIRROR_SEED=N
// in the environment is set_seed(N) of schedule.h.
#pragma once
#include "core/tensor/device.h"

namespace mirror {

/// Registers the kind and its kernels at the first call.
tessera::Device device(int index = 0);

}  // namespace mirror
