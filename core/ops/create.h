// Creating tensors. The dtype defaults to the context's default float dtype, for integer ranges to
// i64; the device to default_device().
#pragma once
#include <optional>
#include <type_traits>
#include <vector>

#include "core/dispatch/default_device.h"
#include "core/ops/scalar.h"
#include "core/primitive/registry.h"

namespace tessera {

struct TensorOptions {
  std::optional<DType> dtype = {};
  Device device = default_device();
  /// Undefined, or a tensor of the same shape. If that one is sharded the new tensor is too, and
  /// each rank makes its own piece.
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
/// A 0-d tensor: of the default float dtype for a floating number, i64 for an integer.
Tensor scalar_tensor(Scalar value, TensorOptions options = {});
/// begin, begin + step, ... below end.
Tensor arange(Scalar begin, Scalar end, Scalar step = 1, TensorOptions options = {});
Tensor arange(Scalar end, TensorOptions options = {});  // from 0
/// `count` values from first to last, both included.
Tensor linspace(double first, double last, int64_t count, TensorOptions options = {});
/// Ones on the diagonal of [rows, columns].
Tensor eye(int64_t rows, int64_t columns, TensorOptions options = {});
Tensor eye(int64_t n, TensorOptions options = {});
/// A CPU tensor on the caller's memory, dense in row-major order, by default of the default float
/// dtype. The memory must live as long as the tensor and all its views.
Tensor from_blob(void* data, const Shape& shape, TensorOptions options = {});

/// Numbers as a program writes them: one, or a list in braces of TensorData of equal shapes.
class TensorData {
 public:
  template <class T>
  requires std::is_arithmetic_v<T> TensorData(T number) : numbers{Scalar(number)} {}
  /// Throws ShapeError where shapes differ.
  TensorData(std::initializer_list<TensorData> list);
  Shape shape;
  std::vector<Scalar> numbers;  // in row-major order
};
/// tensor({{1., 2.}, {3., 4.}}) is [2, 2], tensor(1.) has no dims. Without a dtype: the default
/// float one where a number has a point, else i64, else bool.
Tensor tensor(const TensorData& data, TensorOptions options = {});
/// `x` below (tril) or above (triu) the `diagonal`-th diagonal of the last two dims, zero
/// elsewhere.
Tensor tril(const Tensor& x, int64_t diagonal = 0);
Tensor triu(const Tensor& x, int64_t diagonal = 0);

void register_create_ops(OpRegistry& registry);

}  // namespace tessera
