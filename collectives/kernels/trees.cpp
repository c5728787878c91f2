// Reduces over ranks in a balanced tree, element by element, in blocks that stay in the first-level
// cache. 16-bit floats are widened to f32, combined there and rounded once. An average divides
// once; where the number of ranks is a power of two it multiplies by the inverse instead, which
// gives the same bits because that inverse is exact.
#include "collectives/kernels/trees.h"

#include <cstdint>
#include <type_traits>

#include "core/base/boundaries.h"

// clang-format off
#include "core/ops/functors/prelude.h"
#include "core/ops/functors/convert.h"
// clang-format on

namespace tessera::detail {
namespace {

using fn::BF16, fn::F16;

// Elements of a block. The blocks of all levels together stay in the first-level cache.
constexpr int64_t kBlock = limit("trees.block");

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
// If either operand is NaN, so is the result.
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

inline float wide(BF16 x) { return fn::widen(x); }
inline float wide(F16 x) { return fn::widen(x); }
template <class T>
T wide(T x) {
  return x;
}
inline void narrow(float x, BF16& y) { y = fn::to_bf16(x); }
inline void narrow(float x, F16& y) { y = fn::to_f16(x); }
template <class T>
void narrow(T x, T& y) {
  y = x;
}

/// The number of sources in the left branch: the largest power of two below n, for n of at least 2.
inline int left_of(int n) {
  int left = 1;
  while (2 * left < n) left *= 2;
  return left;
}

/// Reduces one block of elements. T is the type in memory, A the type of the arithmetic.
template <class T, class A, class Op>
struct Tree {
  const void* const* sources;
  int64_t begin, n;

  /// Returns the result over sources [low, high). It is in `home`, or for a single source where
  /// that is.
  const A* evaluate(int low, int high, A* home) const {
    if (high - low == 1) return leaf(low, home);
    alignas(64) A left_block[kBlock], right_block[kBlock];
    int middle = low + left_of(high - low);
    const A* a = evaluate(low, middle, left_block);
    const A* b = evaluate(middle, high, right_block);
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) home[i] = Op::apply(a[i], b[i]);
    return home;
  }

 private:
  const A* leaf(int source, A* home) const {
    const T* p = static_cast<const T*>(sources[source]) + begin;
    if constexpr (std::is_same_v<T, A>) {
      return p;
    } else {
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) home[i] = wide(p[i]);
      return home;
    }
  }
};

/// Turns a sum into an average: times `inverse` where that is exact, else divided by `by`.
template <class A>
void divide(const A* x, A* home, int64_t n, int by) {
  if ((by & (by - 1)) == 0) {
    const A inverse = A(1) / A(by);
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) home[i] = x[i] * inverse;
    return;
  }
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) home[i] = x[i] / A(by);
}

/// Reduces two sources in one pass.
template <class T, class A, class Op, bool average, bool twice>
void reduce_pair(T* to, T* and_to, const T* a, const T* b, int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    A x = Op::apply(wide(a[i]), wide(b[i]));
    if constexpr (average) x *= A(0.5);
    T y;
    narrow(x, y);
    to[i] = y;
    if constexpr (twice) and_to[i] = y;
  }
}

template <class T, class A, class Op, bool average>
void reduce_to_one(T* dst, const void* const* sources, int n_sources, int64_t count, int terms) {
  if (n_sources == 2 && terms == 2) {
    const T *a = static_cast<const T*>(sources[0]), *b = static_cast<const T*>(sources[1]);
    return reduce_pair<T, A, Op, average, false>(dst, dst, a, b, count);
  }
  alignas(64) A top[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    int64_t n = count - begin < kBlock ? count - begin : kBlock;
    A* home = top;
    if constexpr (std::is_same_v<T, A>) home = dst + begin;
    const A* result = Tree<T, A, Op>{sources, begin, n}.evaluate(0, n_sources, home);
    if constexpr (average) {
      divide(result, home, n, terms);
      result = home;
    }
    if constexpr (std::is_same_v<T, A>) {
      if (result != home)
        __builtin_memmove(home, result, static_cast<unsigned long>(n) * sizeof(T));
    } else {
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) narrow(result[i], dst[begin + i]);
    }
  }
}

template <class T, class A, class Op, bool average = false>
void reduce(void* const* to, int n_to, const void* const* sources, int n_sources, int64_t count,
            int terms) {
  T* dst = static_cast<T*>(to[0]);
  if (n_sources == 2 && terms == 2 && n_to == 2) {
    // Both places are written in one pass: copying the first would wait for the stores just made.
    const T *a = static_cast<const T*>(sources[0]), *b = static_cast<const T*>(sources[1]);
    return reduce_pair<T, A, Op, average, true>(dst, static_cast<T*>(to[1]), a, b, count);
  }
  reduce_to_one<T, A, Op, average>(dst, sources, n_sources, count, terms);
  for (int k = 1; k < n_to; ++k)
    __builtin_memmove(to[k], dst, static_cast<unsigned long>(count) * sizeof(T));
}

template <class Op>
constexpr void fill(TreeKernel (&row)[7]) {
  row[0] = reduce<uint8_t, uint8_t, Op>;
  row[1] = reduce<int32_t, int32_t, Op>;
  row[2] = reduce<int64_t, int64_t, Op>;
}
template <class Op, bool average>
constexpr void fill_floats(TreeKernel (&row)[7]) {
  row[3] = reduce<F16, float, Op, average>;
  row[4] = reduce<BF16, float, Op, average>;
  row[5] = reduce<float, float, Op, average>;
  row[6] = reduce<double, double, Op, average>;
}
template <class Op>
constexpr void fill_all(TreeKernel (&row)[7]) {
  fill<Op>(row);
  fill_floats<Op, false>(row);
}

constexpr TreeTable make_table() {
  TreeTable t{};
  fill_all<Sum>(t.kernels[0]);
  fill_floats<Sum, true>(t.kernels[1]);  // kAvg
  fill_all<Product>(t.kernels[2]);
  fill_all<Min>(t.kernels[3]);
  fill_all<Max>(t.kernels[4]);
  fill<And>(t.kernels[5]);
  fill<Or>(t.kernels[6]);
  fill<Xor>(t.kernels[7]);
  return t;
}

}  // namespace

template <>
const TreeTable& tree_table<isa::TESSERA_ISA>() {
  static constexpr TreeTable table = make_table();
  return table;
}

}  // namespace tessera::detail
