// Making tensors. dtype defaults to the context's default float dtype for real values, i64 for
// integer ranges, the device to default_device().
#pragma once
#include <optional>

#include "core/dispatch/default_device.h"
#include "core/ops/scalar.h"
#include "core/primitive/registry.h"

namespace tessera {

struct TensorOptions {
  std::optional<DType> dtype = {};
  Device device = default_device();
  /// Undefined, or a tensor of the same shape: if that is sharded so is the new one, and each rank
  /// makes its own piece.
  Tensor placed_like = {};
};
/// dtype, device and placement of `t`.
TensorOptions options_of(const Tensor& t);

Tensor full(const Shape& shape, Scalar value, TensorOptions options = {});
Tensor zeros(const Shape& shape, TensorOptions options = {});
Tensor ones(const Shape& shape, TensorOptions options = {});
Tensor zeros_like(const Tensor& x);
Tensor ones_like(const Tensor& x);
Tensor full_like(const Tensor& x, Scalar value);
Tensor empty_like(const Tensor& x);
/// begin, begin + step, ... below end.
Tensor arange(Scalar begin, Scalar end, Scalar step = 1, TensorOptions options = {});
/// `count` values from first to last, both included.
Tensor linspace(double first, double last, int64_t count, TensorOptions options = {});
/// Ones on the diagonal of [rows, columns].
Tensor eye(int64_t rows, int64_t columns, TensorOptions options = {});
/// `x` below (tril) or above (triu) the `diagonal`-th diagonal of the last two dims, zero
/// elsewhere.
Tensor tril(const Tensor& x, int64_t diagonal = 0);
Tensor triu(const Tensor& x, int64_t diagonal = 0);

void register_create_ops(OpRegistry& registry);

}  // namespace tessera
