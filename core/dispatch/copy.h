// Copies of values between layouts and devices, made below every layer: the backend uses them to
// prepare operands.
#pragma once
#include "core/primitive/primitive.h"

namespace tessera {

/// The primitive `copy`: the same values, row-major dense.
const PrimRef& copy_primitive();
/// A dense copy of `t`, made at once by the device's copy kernel.
Tensor dense_copy(const Tensor& t);
/// The primitive `transfer` to `device`.
PrimRef transfer_primitive(Device device);
/// A dense copy of `t` on `device`, enqueued at once. From a device to the host no thread blocks:
/// the result is pending until the copy has ended. From ordinary memory of the host the thread may
/// wait until it has been read; a source of the device's host_allocator() has a reader instead.
Tensor transferred(const Tensor& t, Device device);
/// `t` itself where the host can read its values, else a copy on the CPU.
Tensor on_host(const Tensor& t);
/// Overwrites `dst`, of any strides, with the values of `src` (same shape and dtype). Does not bump
/// the version.
void copy_values(const Tensor& dst, const Tensor& src);

}  // namespace tessera
