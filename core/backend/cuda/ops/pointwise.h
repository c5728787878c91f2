// Pointwise launches on tensors, which other families use to convert and to copy.
#pragma once
#include <initializer_list>
#include <string_view>

#include "core/ops/scalar.h"
#include "core/tensor/stream.h"
#include "core/tensor/tensor.h"

namespace tessera::cuda {

/// Fills `out`, of any strides, with one number.
void fill(const Tensor& out, Scalar value, const Stream& stream);
/// Overwrites `out`, of any strides, with the values of `in` in the dtype of `out`.
void convert(const Tensor& in, const Tensor& out, const Stream& stream);

/// Enqueues a pointwise op; `in` are operands of the dtype of `out` that broadcast to its shape,
/// and may be `out`.
void compute(std::string_view op, std::initializer_list<Tensor> in, const Tensor& out,
             const Stream& stream);

}  // namespace tessera::cuda
