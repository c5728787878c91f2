// Pointwise launches on tensors, which other families use to convert and to copy.
#pragma once
#include "core/ops/scalar.h"
#include "core/tensor/stream.h"
#include "core/tensor/tensor.h"

namespace tessera::cuda {

/// Fills `out`, of any strides, with one number.
void fill(const Tensor& out, Scalar value, const Stream& stream);
/// Overwrites `out`, of any strides, with the values of `in` in the dtype of `out`.
void convert(const Tensor& in, const Tensor& out, const Stream& stream);

/// Adds `more`, which broadcasts to the shape of `to`, in place; both have one dtype.
void add_to(const Tensor& to, const Tensor& more, const Stream& stream);

}  // namespace tessera::cuda
