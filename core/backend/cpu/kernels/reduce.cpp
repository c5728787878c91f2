// Reductions with a fixed order: a row is cut into blocks of kBlock elements, each summed in kLanes
// interleaved lanes, the lanes and then the blocks meet in a balanced tree. The order depends on
// the extents only, not on threads or vector width. bf16 is widened as it is read.
#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/kernels/lanes.h"
#include "core/backend/cpu/kernels/tables.h"
#include "core/base/boundaries.h"
// clang-format off
#include "core/ops/functors/prelude.h"
#include "core/ops/functors/convert.h"
// clang-format on

namespace tessera::cpu {
namespace {

constexpr int kLanes = limit("reduce.lanes");
constexpr int64_t kBlock = limit("reduce.block");

struct Sum {
  template <class T>
  static T start() {
    return T(0);
  }
  template <class T>
  static T join(T a, T b) {
    return a + b;
  }
};
struct Prod {
  template <class T>
  static T start() {
    return T(1);
  }
  template <class T>
  static T join(T a, T b) {
    return a * b;
  }
};
struct Max {
  template <class T>
  static T start() {
    return T(0.5) != T(0) ? T(-__builtin_inf()) : T(int64_t(1) << 63);
  }
  template <class T>
  static T join(T a, T b) {
    return a > b || a != a ? a : b;
  }
};
struct Min {
  template <class T>
  static T start() {
    return T(0.5) != T(0) ? T(__builtin_inf()) : T(~(int64_t(1) << 63));
  }
  template <class T>
  static T join(T a, T b) {
    return a < b || a != a ? a : b;
  }
};
struct Any {
  template <class T>
  static T start() {
    return T(0);
  }
  template <class T>
  static T join(T a, T b) {
    return T((a != T(0)) | (b != T(0)));
  }
};
struct All {
  template <class T>
  static T start() {
    return T(1);
  }
  template <class T>
  static T join(T a, T b) {
    return T((a != T(0)) & (b != T(0)));
  }
};

using fn::BF16, fn::widen;

template <class T>
inline T widen(T x) {
  return x;
}
template <class In>
using SumOf = decltype(widen(In()));

template <class Op, class In, class T = SumOf<In>>
T block(const In* x, int64_t n) {
  T lane[kLanes];
  for (int i = 0; i < kLanes; ++i) lane[i] = Op::template start<T>();
  int64_t k = 0;
  for (; k + kLanes <= n; k += kLanes)
    for (int i = 0; i < kLanes; ++i) lane[i] = Op::join(lane[i], widen(x[k + i]));
  for (int i = 0; k + i < n; ++i) lane[i] = Op::join(lane[i], widen(x[k + i]));
  return fold<Op, kLanes>(lane);
}

template <class Op, class In>
SumOf<In> row(const In* x, int64_t n) {
  if (n <= kBlock) return block<Op>(x, n);
  // Halves at a multiple of the block, the larger first: a balanced tree over blocks.
  int64_t blocks = (n + kBlock - 1) / kBlock, left = (blocks + 1) / 2 * kBlock;
  return Op::join(row<Op>(x, left), row<Op>(x + left, n - left));
}

// Rows of `inner` elements are joined elementwise; the tree is over runs of kRun rows. Rows lie
// further apart than the CPU looks ahead by itself.
constexpr int64_t kRun = limit("reduce.run"), kColumns = limit("reduce.columns"), kRowsAhead = 8;
template <class Op, class In, class T = SumOf<In>>
void columns(const In* x, T* out, int64_t n, int64_t inner, int64_t width) {
  if (n <= kRun) {
    for (int64_t i = 0; i < width; ++i) out[i] = Op::template start<T>();
    for (int64_t r = 0; r < n; ++r) {
      const In* from = x + r * inner;
      for (int64_t i = 0; i < width; i += 64 / int64_t(sizeof(In)))
        __builtin_prefetch(from + kRowsAhead * inner + i);
      for (int64_t i = 0; i < width; ++i) out[i] = Op::join(out[i], widen(from[i]));
    }
    return;
  }
  int64_t runs = (n + kRun - 1) / kRun, left = (runs + 1) / 2 * kRun;
  T other[kColumns];
  columns<Op>(x, out, left, inner, width);
  columns<Op>(x + left * inner, other, n - left, inner, width);
  for (int64_t i = 0; i < width; ++i) out[i] = Op::join(out[i], other[i]);
}

template <class Op, class In>
void reduce(const In* x, SumOf<In>* out, int64_t n, int64_t inner, int64_t begin, int64_t end) {
  for (int64_t o = begin; o < end; ++o) {
    if (inner == 1) {
      out[o] = row<Op>(x + o * n, n);
      continue;
    }
    for (int64_t c = 0; c < inner; c += kColumns) {
      int64_t width = inner - c < kColumns ? inner - c : kColumns;
      columns<Op>(x + o * n * inner + c, out + o * inner + c, n, inner, width);
    }
  }
}

void sum_bf16(const uint16_t* x, float* out, int64_t n, int64_t inner, int64_t begin, int64_t end) {
  reduce<Sum>(reinterpret_cast<const BF16*>(x), out, n, inner, begin, end);
}

}  // namespace

template <>
const ReduceTable& isa_table<ReduceTable, isa::TESSERA_ISA>() {
  static const ReduceTable table{{reduce<Sum, float>, reduce<Prod, float>, reduce<Max, float>,
                                  reduce<Min, float>, reduce<Any, float>, reduce<All, float>},
                                 {reduce<Sum, double>, reduce<Prod, double>, reduce<Max, double>,
                                  reduce<Min, double>, reduce<Any, double>, reduce<All, double>},
                                 {reduce<Sum, int64_t>, reduce<Prod, int64_t>, reduce<Max, int64_t>,
                                  reduce<Min, int64_t>, reduce<Any, int64_t>, reduce<All, int64_t>},
                                 sum_bf16};
  return table;
}

}  // namespace tessera::cpu
