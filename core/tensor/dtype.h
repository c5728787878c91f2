// Element types, in the order of promotion within a category (bool < integers < floats), then the
// 8-bit floats: storage formats, which copies, views, conversions, transfers, exchanges of bytes
// and scaled_matmul take; every other op refuses them. Invariant: promote() equals PyTorch's
// result_type for two dimensioned tensors; a test compares the whole table.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tessera {

enum class DType : uint8_t { kBool, kU8, kI32, kI64, kF16, kBF16, kF32, kF64, kF8E4M3, kF8E5M2 };
inline constexpr DType kBool = DType::kBool, kU8 = DType::kU8, kI32 = DType::kI32,
                       kI64 = DType::kI64, kF16 = DType::kF16, kBF16 = DType::kBF16,
                       kF32 = DType::kF32, kF64 = DType::kF64, kF8E4M3 = DType::kF8E4M3,
                       kF8E5M2 = DType::kF8E5M2;
inline constexpr int kNumDTypes = 10;
inline constexpr DType kAllDTypes[] = {kBool, kU8,  kI32, kI64,    kF16,
                                       kBF16, kF32, kF64, kF8E4M3, kF8E5M2};
/// The dtypes that ops compute with: all but the storage formats.
inline constexpr DType kComputedDTypes[] = {kBool, kU8, kI32, kI64, kF16, kBF16, kF32, kF64};

constexpr size_t size_of(DType t) {
  constexpr size_t bytes[] = {1, 1, 4, 8, 2, 2, 4, 8, 1, 1};
  return bytes[int(t)];
}
constexpr bool is_floating(DType t) { return t >= kF16; }
constexpr bool is_storage_only(DType t) { return t >= kF8E4M3; }
/// Tensors of these have gradients.
constexpr bool is_differentiable(DType t) { return is_floating(t) && !is_storage_only(t); }
constexpr bool is_integral(DType t) { return t < kF16; }  // bool included, as in PyTorch
constexpr std::string_view name_of(DType t) {
  constexpr std::string_view names[] = {"bool", "u8",  "i32", "i64",    "f16",
                                        "bf16", "f32", "f64", "f8e4m3", "f8e5m2"};
  return names[int(t)];
}

/// Throws UserError.
[[noreturn]] void refuse_promotion(DType a, DType b);

/// The type that two tensors of at least one dim are computed in. f16 with bf16 gives f32. Throws
/// UserError for a storage format beside another dtype.
constexpr DType promote(DType a, DType b) {
  if (a == b) return a;
  DType low = a < b ? a : b, high = a < b ? b : a;
  if (is_storage_only(high)) refuse_promotion(a, b);
  return low == kF16 && high == kBF16 ? kF32 : high;
}

/// Kernels compute with 16-bit floats in f32 and round results to nearest even.
struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

/// The 8-bit floats of the OCP. E4M3 (PyTorch's float8_e4m3fn) has 3 bits of mantissa, no
/// infinities and the largest value 448; E5M2 (float8_e5m2) has 2 bits, infinities and 57344.
/// Conversions round to nearest even. What is rounded beyond the largest value becomes NaN in E4M3
/// and infinite in E5M2: clamp first to saturate.
struct Float8E4M3 {
  uint8_t bits;
};
struct Float8E5M2 {
  uint8_t bits;
};

template <class T>
struct DTypeOf;
template <>
struct DTypeOf<bool> {
  static constexpr DType value = kBool;
};
template <>
struct DTypeOf<uint8_t> {
  static constexpr DType value = kU8;
};
template <>
struct DTypeOf<int32_t> {
  static constexpr DType value = kI32;
};
template <>
struct DTypeOf<int64_t> {
  static constexpr DType value = kI64;
};
template <>
struct DTypeOf<Half> {
  static constexpr DType value = kF16;
};
template <>
struct DTypeOf<BFloat16> {
  static constexpr DType value = kBF16;
};
template <>
struct DTypeOf<Float8E4M3> {
  static constexpr DType value = kF8E4M3;
};
template <>
struct DTypeOf<Float8E5M2> {
  static constexpr DType value = kF8E5M2;
};
template <>
struct DTypeOf<float> {
  static constexpr DType value = kF32;
};
template <>
struct DTypeOf<double> {
  static constexpr DType value = kF64;
};
template <class T>
inline constexpr DType dtype_of = DTypeOf<T>::value;

}  // namespace tessera
