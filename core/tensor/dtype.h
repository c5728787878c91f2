// Element types, in the order of promotion within a category (bool < integers < floats).
// Invariant: promote() equals PyTorch's result_type for two dimensioned tensors; a test compares
// the whole table.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tessera {

enum class DType : uint8_t { kBool, kU8, kI32, kI64, kF16, kBF16, kF32, kF64 };
inline constexpr DType kBool = DType::kBool, kU8 = DType::kU8, kI32 = DType::kI32,
                       kI64 = DType::kI64, kF16 = DType::kF16, kBF16 = DType::kBF16,
                       kF32 = DType::kF32, kF64 = DType::kF64;
inline constexpr int kNumDTypes = 8;
inline constexpr DType kAllDTypes[] = {kBool, kU8, kI32, kI64, kF16, kBF16, kF32, kF64};

constexpr size_t size_of(DType t) {
  constexpr size_t bytes[] = {1, 1, 4, 8, 2, 2, 4, 8};
  return bytes[int(t)];
}
constexpr bool is_floating(DType t) { return t >= kF16; }
constexpr bool is_integral(DType t) { return t < kF16; }  // bool included, as in PyTorch
constexpr std::string_view name_of(DType t) {
  constexpr std::string_view names[] = {"bool", "u8", "i32", "i64", "f16", "bf16", "f32", "f64"};
  return names[int(t)];
}

/// The type that two tensors of at least one dim are computed in. f16 with bf16 gives f32.
constexpr DType promote(DType a, DType b) {
  if (a == b) return a;
  DType low = a < b ? a : b, high = a < b ? b : a;
  return low == kF16 && high == kBF16 ? kF32 : high;
}

/// 16-bit floats are storage formats: kernels compute in f32 and round to nearest even.
struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
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
