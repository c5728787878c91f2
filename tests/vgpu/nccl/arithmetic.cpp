#include "tests/vgpu/nccl/arithmetic.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace vgpu::nccl {

using tessera::nccl::DataType;
using tessera::nccl::RedOp;

namespace {

struct Bfloat16 {
  uint16_t bits;
  operator float() const {  // NOLINT(google-explicit-constructor): it computes as float does
    const uint32_t wide = uint32_t{bits} << 16;
    float f;
    std::memcpy(&f, &wide, 4);
    return f;
  }
  explicit Bfloat16(float f) {
    uint32_t wide;
    std::memcpy(&wide, &f, 4);
    if (f != f)
      wide |= 0x400000;
    else
      wide += 0x7fff + (wide >> 16 & 1);
    bits = static_cast<uint16_t>(wide >> 16);
  }
};

// The type in which two elements are combined.
template <class T>
struct Wide {
  using Type = T;
};
template <>
struct Wide<_Float16> {
  using Type = float;
};
template <>
struct Wide<Bfloat16> {
  using Type = float;
};
template <>
struct Wide<int8_t> {
  using Type = int32_t;
};
template <>
struct Wide<uint8_t> {
  using Type = uint32_t;
};
// Overflow of signed integers wraps on a card.
template <>
struct Wide<int32_t> {
  using Type = int64_t;
};

template <class T>
T combine(RedOp op, T a, T b) {
  using W = typename Wide<T>::Type;
  const W x = static_cast<W>(a), y = static_cast<W>(b);
  switch (op) {
    case RedOp::kProd: return static_cast<T>(x * y);
    case RedOp::kMax: return static_cast<T>(std::max(x, y));
    case RedOp::kMin: return static_cast<T>(std::min(x, y));
    default: break;
  }
  if constexpr (std::is_same_v<T, int64_t>)
    return static_cast<T>(static_cast<uint64_t>(x) + static_cast<uint64_t>(y));
  else
    return static_cast<T>(x + y);
}

template <class T>
T element(const char* of, size_t i) {
  T value{0};
  std::memcpy(static_cast<void*>(&value), of + i * sizeof(T), sizeof(T));
  return value;
}

template <class T>
void reduce_as(const Reduction& how, const std::vector<const char*>& in, char* out, size_t count,
               size_t first, size_t total) {
  using W = typename Wide<T>::Type;
  const size_t n = in.size();
  constexpr bool kIntegral = std::is_integral_v<T>;
  const auto term = [&](size_t r, size_t i) {
    const T v = element<T>(in[r], i);
    if (how.scaled) return static_cast<T>(static_cast<W>(v) * static_cast<W>(how.scale));
    if (how.op == RedOp::kAvg && !kIntegral)
      return static_cast<T>(static_cast<W>(v) * (W{1} / static_cast<W>(n)));
    return v;
  };
  for (size_t i = 0; i < count; ++i) {
    const size_t turn = ((first + i) * n / std::max<size_t>(total, 1) + 1) % n;
    T sum = term(turn, i);
    for (size_t k = 1; k < n; ++k) sum = combine(how.op, sum, term((turn + k) % n, i));
    if (how.op == RedOp::kAvg && kIntegral)
      sum = static_cast<T>(static_cast<W>(sum) / static_cast<W>(n));
    std::memcpy(out + i * sizeof(T), &sum, sizeof(T));
  }
}

}  // namespace

size_t size_of(DataType type) {
  switch (type) {
    case DataType::kInt8:
    case DataType::kUint8: return 1;
    case DataType::kFloat16:
    case DataType::kBfloat16: return 2;
    case DataType::kInt32:
    case DataType::kUint32:
    case DataType::kFloat32: return 4;
    default: return 8;
  }
}

void reduce(const Reduction& how, DataType type, const std::vector<const char*>& in, char* out,
            size_t count, size_t first, size_t total) {
  switch (type) {
    case DataType::kInt8: return reduce_as<int8_t>(how, in, out, count, first, total);
    case DataType::kUint8: return reduce_as<uint8_t>(how, in, out, count, first, total);
    case DataType::kInt32: return reduce_as<int32_t>(how, in, out, count, first, total);
    case DataType::kUint32: return reduce_as<uint32_t>(how, in, out, count, first, total);
    case DataType::kInt64: return reduce_as<int64_t>(how, in, out, count, first, total);
    case DataType::kUint64: return reduce_as<uint64_t>(how, in, out, count, first, total);
    case DataType::kFloat16: return reduce_as<_Float16>(how, in, out, count, first, total);
    case DataType::kFloat32: return reduce_as<float>(how, in, out, count, first, total);
    case DataType::kFloat64: return reduce_as<double>(how, in, out, count, first, total);
    case DataType::kBfloat16: return reduce_as<Bfloat16>(how, in, out, count, first, total);
  }
}

}  // namespace vgpu::nccl
