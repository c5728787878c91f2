// Pointwise launches on tensors, which other families use to convert and to copy.
#pragma once
#include "core/backend/cuda/kernels/pointwise.h"
#include "core/ops/scalar.h"
#include "core/tensor/stream.h"
#include "core/tensor/tensor.h"

namespace tessera::cuda {

/// Enqueues `instance` over tensors[0], the result, and its operands, which broadcast to it.
/// Operands that are host numbers are read now and go by value: as bits of the compute type, or as
/// they lie in memory where `bits`.
void run_walk(const Instance& instance, PointwiseShape shape,
              std::span<const Tensor* const> tensors, bool bits, Report* report,
              const Stream& stream);
/// Fills `out`, of any strides, with one number.
void fill(const Tensor& out, Scalar value, const Stream& stream);
/// Overwrites `out`, of any strides, with the values of `in` in the dtype of `out`.
void convert(const Tensor& in, const Tensor& out, const Stream& stream);

}  // namespace tessera::cuda
