#include "collectives/reduction.h"

#include <bit>
#include <cstring>
#include <type_traits>

#include "core/tensor/element.h"

namespace tessera::detail {
namespace {

constexpr int64_t kBlock = 1024;  // elements; a block of every level stays in the first-level cache

struct Sum {
  template <class A>
  static A apply(A a, A b) {
    if constexpr (std::is_integral_v<A>)  // wraps around, without undefined behaviour
      return A(std::make_unsigned_t<A>(a) + std::make_unsigned_t<A>(b));
    else
      return a + b;
  }
};
struct Product {
  template <class A>
  static A apply(A a, A b) {
    if constexpr (std::is_integral_v<A>)
      return A(uint64_t(a) * uint64_t(b));
    else
      return a * b;
  }
};
// A NaN on either side is the result.
struct Min {
  template <class A>
  static A apply(A a, A b) {
    return a != a || a < b ? a : b;
  }
};
struct Max {
  template <class A>
  static A apply(A a, A b) {
    return a != a || a > b ? a : b;
  }
};
struct And {
  template <class A>
  static A apply(A a, A b) {
    return A(a & b);
  }
};
struct Or {
  template <class A>
  static A apply(A a, A b) {
    return A(a | b);
  }
};
struct Xor {
  template <class A>
  static A apply(A a, A b) {
    return A(a ^ b);
  }
};

float widen(BFloat16 x) { return to_float(x); }
float widen(Half x) { return to_float(x); }
void narrow(float x, BFloat16& y) {
  // Round to nearest even in plain integer steps, so that the loop vectorises.
  uint32_t bits = std::bit_cast<uint32_t>(x);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  y.bits = uint16_t(x != x ? (bits >> 16) | 0x40 : rounded);
}
void narrow(float x, Half& y) { y = to_half(x); }

/// T is what is stored, A what is computed with.
template <class T, class A, class Op>
class Tree {
 public:
  Tree(std::span<const void* const> sources, int64_t begin, int64_t n)
      : sources_(sources), begin_(begin), n_(n) {}

  /// Result over sources [low, high), in `home` or, for a single source, wherever it lies.
  const A* evaluate(int low, int high, A* home) {
    if (high - low == 1) return leaf(low, home);
    alignas(64) A left_block[kBlock], right_block[kBlock];
    int left = int(std::bit_ceil(unsigned(high - low)) / 2);
    const A* a = evaluate(low, low + left, left_block);
    const A* b = evaluate(low + left, high, right_block);
#pragma GCC ivdep
    for (int64_t i = 0; i < n_; ++i) home[i] = Op::apply(a[i], b[i]);
    return home;
  }

 private:
  const A* leaf(int source, A* home) {
    const T* p = static_cast<const T*>(sources_[source]) + begin_;
    if constexpr (std::is_same_v<T, A>) {
      return p;
    } else {
#pragma GCC ivdep
      for (int64_t i = 0; i < n_; ++i) home[i] = widen(p[i]);
      return home;
    }
  }

  std::span<const void* const> sources_;
  int64_t begin_, n_;
};

template <class T, class A, class Op>
void reduce(T* dst, std::span<const void* const> sources, int64_t count, bool average) {
  alignas(64) A top[kBlock];
  int n_sources = int(sources.size());
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    int64_t n = std::min(kBlock, count - begin);
    A* home = top;
    if constexpr (std::is_same_v<T, A>) home = dst + begin;
    const A* result = Tree<T, A, Op>(sources, begin, n).evaluate(0, n_sources, home);
    if constexpr (std::is_floating_point_v<A>) {
      if (average) {
        A by = A(n_sources);
#pragma GCC ivdep
        for (int64_t i = 0; i < n; ++i) home[i] = result[i] / by;
        result = home;
      }
    }
    if constexpr (std::is_same_v<T, A>) {
      if (result != home) std::memmove(home, result, size_t(n) * sizeof(T));
    } else {
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) narrow(result[i], dst[begin + i]);
    }
  }
}

template <class T, class A = T>
void reduce_as(ReduceOp op, void* dst, std::span<const void* const> sources, int64_t count) {
  T* d = static_cast<T*>(dst);
  switch (op) {
    case ReduceOp::kSum: return reduce<T, A, Sum>(d, sources, count, false);
    case ReduceOp::kAvg: return reduce<T, A, Sum>(d, sources, count, true);
    case ReduceOp::kProduct: return reduce<T, A, Product>(d, sources, count, false);
    case ReduceOp::kMin: return reduce<T, A, Min>(d, sources, count, false);
    case ReduceOp::kMax: return reduce<T, A, Max>(d, sources, count, false);
    default: break;
  }
  if constexpr (std::is_integral_v<A>) {
    switch (op) {
      case ReduceOp::kBitAnd: return reduce<T, A, And>(d, sources, count, false);
      case ReduceOp::kBitOr: return reduce<T, A, Or>(d, sources, count, false);
      default: return reduce<T, A, Xor>(d, sources, count, false);
    }
  }
}

void reduce_bool(ReduceOp op, void* dst, std::span<const void* const> sources, int64_t count) {
  auto* d = static_cast<uint8_t*>(dst);
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
    case ReduceOp::kBitOr: return reduce<uint8_t, uint8_t, Or>(d, sources, count, false);
    case ReduceOp::kBitXor: return reduce<uint8_t, uint8_t, Xor>(d, sources, count, false);
    default: return reduce<uint8_t, uint8_t, And>(d, sources, count, false);
  }
}

}  // namespace

bool reducible(ReduceOp op, DType dtype) {
  if (op == ReduceOp::kAvg) return is_floating(dtype);
  return op < ReduceOp::kBitAnd || is_integral(dtype);
}

void reduce_tree(ReduceOp op, DType dtype, void* dst, std::span<const void* const> sources,
                 int64_t count) {
  TESSERA_ASSERT(reducible(op, dtype) && !sources.empty(), "{} of {}", name_of(op), name_of(dtype));
  switch (dtype) {
    case DType::kBool: return reduce_bool(op, dst, sources, count);
    case DType::kU8: return reduce_as<uint8_t>(op, dst, sources, count);
    case DType::kI32: return reduce_as<int32_t>(op, dst, sources, count);
    case DType::kI64: return reduce_as<int64_t>(op, dst, sources, count);
    case DType::kF16: return reduce_as<Half, float>(op, dst, sources, count);
    case DType::kBF16: return reduce_as<BFloat16, float>(op, dst, sources, count);
    case DType::kF32: return reduce_as<float>(op, dst, sources, count);
    case DType::kF64: return reduce_as<double>(op, dst, sources, count);
  }
}

}  // namespace tessera::detail
