// Copies of values between layouts, made below every layer: the backend uses them to prepare
// operands.
#pragma once
#include "core/primitive/primitive.h"

namespace tessera {

/// The primitive `copy`: the same values, row-major dense.
const PrimRef& copy_primitive();
/// A dense copy of `t`, made at once by the device's copy kernel.
Tensor dense_copy(const Tensor& t);
/// Overwrites `dst`, of any strides, with the values of `src` (same shape and dtype). Does not bump
/// the version.
void copy_values(const Tensor& dst, const Tensor& src);

}  // namespace tessera
