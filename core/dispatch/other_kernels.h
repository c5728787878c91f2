// Kernels of a device for ops that its table does not name: those of a program, also ones that are
// made after the device was registered.
#pragma once
#include "core/dispatch/kernel.h"

namespace tessera {

/// Gives the device's kernel for an op that has neither one in the table nor one of its own
/// (Primitive::own_kernel); null where the device does not run it.
using KernelOf = const Kernel* (*)(const Primitive&);
/// Registers `kernel_of`, which is asked for every such op from now on. Not to be called while
/// other threads run ops.
void add_other_kernels(DeviceKind device, KernelOf kernel_of);
/// The kernel that the registered function gives; null where none is registered for the device.
const Kernel* other_kernel(DeviceKind device, const Primitive& prim);

}  // namespace tessera
