// A number that a caller writes next to a tensor, and the type promotion that follows. Invariant: a
// number takes part in promotion by its category only (bool, integer, float), never by its width.
#pragma once
#include <concepts>

#include "core/tensor/tensor.h"

namespace tessera {

class Scalar {
 public:
  Scalar(bool v) : kind_(kBool), integer_(v) {}
  /// Throws UserError for an unsigned number that int64_t does not hold.
  template <std::integral T>
  Scalar(T v) : kind_(kI64), integer_(int64_t(v)) {
    if constexpr (std::unsigned_integral<T> && sizeof(T) == sizeof(int64_t))
      if (integer_ < 0) [[unlikely]]
        too_large(v);
  }
  template <std::floating_point T>
  Scalar(T v) : kind_(kF64), real_(double(v)) {}

  /// kBool, kI64 or kF64.
  DType kind() const { return kind_; }
  double real() const { return kind_ == kF64 ? real_ : double(integer_); }
  int64_t integer() const { return kind_ == kF64 ? int64_t(real_) : integer_; }

 private:
  [[noreturn]] static void too_large(uint64_t v);
  DType kind_;
  union {
    int64_t integer_;
    double real_;
  };
};

/// The dtype in which `a` and `b` meet: PyTorch's result_type, where a 0-d tensor yields to one
/// with dims unless its category (bool < integer < float) is higher.
DType result_type(const Tensor& a, const Tensor& b);
/// That of all operands: those with dims decide, unless a 0-d one has a higher category.
DType result_type(std::span<const Tensor> operands);
DType result_type(const Tensor& a, Scalar b);

/// PyTorch's can_cast: no float becomes an integer, and nothing but bool a bool.
bool can_cast(DType from, DType to);

/// Writes `value`, converted to `dtype`, to `p`; integers stay exact.
void write_scalar(void* p, DType dtype, Scalar value);
/// A 0-d tensor of `dtype` holding `value`.
Tensor scalar_tensor(Scalar value, DType dtype, Device device = {});
/// A 0-d operand of `dtype` holding `value`, to stand beside `other`: on a device it stays on the
/// CPU, and the kernel takes it by value.
Tensor number_beside(const Tensor& other, Scalar value, DType dtype);

}  // namespace tessera
