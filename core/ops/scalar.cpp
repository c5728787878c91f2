#include "core/ops/scalar.h"

#include <algorithm>
#include <optional>

#include "core/dispatch/context.h"
#include "core/dispatch/precision.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/scalar_range.h"
#include "core/tensor/device_runtime.h"
#include "core/tensor/element.h"

namespace tessera {
namespace {

int category(DType t) { return t == kBool ? 0 : is_integral(t) ? 1 : 2; }

// What `high`, the operand of higher priority, becomes when it meets one of lower priority.
DType yield(DType high, DType low) {
  return category(low) > category(high) ? promote(high, low) : high;
}

}  // namespace

void Scalar::too_large(uint64_t v) {
  throw UserError(fmt::format("scalar: {} is beyond the 64-bit integers; write it as a float", v));
}

DType result_type(const Tensor& a, const Tensor& b) {
  if (a.dtype() == b.dtype()) return a.dtype();
  if ((a.ndim() == 0) == (b.ndim() == 0)) return promote(a.dtype(), b.dtype());
  return a.ndim() == 0 ? yield(b.dtype(), a.dtype()) : yield(a.dtype(), b.dtype());
}

DType result_type(std::span<const Tensor> operands) {
  std::optional<DType> with_dims, numbers;
  for (const Tensor& t : operands) {
    std::optional<DType>& of_kind = t.ndim() ? with_dims : numbers;
    of_kind = of_kind ? promote(*of_kind, t.dtype()) : t.dtype();
  }
  if (!with_dims || !numbers) return with_dims ? *with_dims : numbers.value();
  return yield(*with_dims, *numbers);
}

DType result_type(const Tensor& a, Scalar b) {
  DType number = b.kind() == kF64 ? context().default_dtype : b.kind();
  return yield(a.dtype(), number);
}

bool can_cast(DType from, DType to) { return category(from) <= category(to); }

void write_scalar(void* p, DType dtype, Scalar value) {
  if (value.kind() == kF64)
    write_real(p, dtype, value.real());
  else
    write_integer(p, dtype, value.integer());
}

Scalar nearest_in(DType t, Scalar bound) {
  if (t == kU8) return std::clamp<int64_t>(bound.integer(), 0, UINT8_MAX);
  if (t == kI32) return std::clamp<int64_t>(bound.integer(), INT32_MIN, INT32_MAX);
  return bound;
}

void check_holds(std::string_view op, DType t, Scalar value) {
  if (is_floating(t) || t == kBool) return;
  const bool exact = value.kind() != kF64 || std::abs(value.real()) < 0x1p63;
  const int64_t n = exact ? value.integer() : 0;
  const bool fits = exact && (t == kI64   ? true
                              : t == kI32 ? n >= INT32_MIN && n <= INT32_MAX
                                          : n >= -UINT8_MAX && n <= UINT8_MAX);
  TESSERA_CHECK(
      fits, "{}: {} holds no {}", op, name_of(t),
      value.kind() == kF64 ? fmt::format("{}", value.real()) : fmt::format("{}", value.integer()));
}

void promote_operands(Inputs in) {
  const DType t = result_type(in);
  for (Tensor& x : in) x = cast(std::move(x), t);
}

Tensor scalar_tensor(Scalar value, DType dtype, Device device) {
  if (context().records || !(device.is_cpu() || runtime_of(device).host_addressable())) [[unlikely]]
    return full({}, value, {dtype, device});
  Tensor t = empty({}, dtype, device);
  if (device.is_meta()) return t;
  write_scalar(t.raw(), dtype, value);
  return t;
}

Tensor number_beside(const Tensor& other, Scalar value, DType dtype) {
  return scalar_tensor(value, dtype, other.device().is_meta() ? kMeta : kCPU);
}

}  // namespace tessera
