// What generated kernels stand on, besides the functors: rounding to narrow dtypes, and reductions
// in interleaved lanes (threads, on a GPU) that meet in a balanced tree, so that their order is a
// property of the text and not of the vector width. Printed in front of the kernels of a file,
// behind the functors; like those it includes nothing.
namespace tessera::generated {

using namespace fn;
using namespace functors;

TESSERA_FN float as_bf16(float x) { return widen(to_bf16(x)); }
TESSERA_FN float as_f16(float x) { return widen(to_f16(x)); }
TESSERA_FN long as_i32(long x) { return static_cast<int>(x); }
TESSERA_FN long as_u8(long x) { return static_cast<unsigned char>(x); }
/// No integer is -0, but GCC 12 makes float(long(x)) a trunc(x), which keeps the sign of -0.5. The
/// barrier hides from it that the sum does something.
template <class T>
TESSERA_FN T unsigned_zero(T x) {
#if defined(__has_builtin)
#if __has_builtin(__builtin_assoc_barrier)
  return __builtin_assoc_barrier(x) + T(0);
#endif
#endif
  return x;
}
/// `x` as a position in [0, extent), or -1.
TESSERA_FN int position(long x, long extent) {
  return x >= 0 && x < extent ? static_cast<int>(x) : -1;
}

struct Sum {
  template <class T>
  TESSERA_FN T start() {
    return T(0);
  }
  template <class T>
  TESSERA_FN T join(T a, T b) {
    return a + b;
  }
};
struct Prod {
  template <class T>
  TESSERA_FN T start() {
    return T(1);
  }
  template <class T>
  TESSERA_FN T join(T a, T b) {
    return a * b;
  }
};
/// NaN wins, here and in Min. `prefer` is one instruction, and keeps `a` where b is NaN.
struct Max {
  template <class T>
  TESSERA_FN T prefer(T a, T b) {
    return b > a ? b : a;
  }
  template <class T>
  TESSERA_FN T start() {
    return sizeof(T) == 1 ? T(0) : T(0.5) != T(0) ? T(-inf()) : T(1L << 63);
  }
  template <class T>
  TESSERA_FN T join(T a, T b) {
    return (a > b) | (a != a) ? a : b;
  }
};
struct Min {
  template <class T>
  TESSERA_FN T prefer(T a, T b) {
    return b < a ? b : a;
  }
  template <class T>
  TESSERA_FN T start() {
    return sizeof(T) == 1 ? T(1) : T(0.5) != T(0) ? T(inf()) : T(~(1L << 63));
  }
  template <class T>
  TESSERA_FN T join(T a, T b) {
    return (a < b) | (a != a) ? a : b;
  }
};
struct Any {
  template <class T>
  TESSERA_FN T start() {
    return false;
  }
  template <class T>
  TESSERA_FN T join(T a, T b) {
    return a | b;
  }
};
struct All {
  template <class T>
  TESSERA_FN T start() {
    return true;
  }
  template <class T>
  TESSERA_FN T join(T a, T b) {
    return a & b;
  }
};

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)

/// `value` of all threads of the block, for each of them: thread i meets thread i + half, and so
/// on. Every thread of the block calls it.
template <class Op, class T>
TESSERA_FN T block_reduce(T value) {
  __shared__ T shared[1024];
  shared[threadIdx.x] = value;
  __syncthreads();
  for (unsigned n = blockDim.x; n > 1;) {
    const unsigned half = (n + 1) / 2;
    if (threadIdx.x + half < n)
      shared[threadIdx.x] = Op::join(shared[threadIdx.x], shared[threadIdx.x + half]);
    __syncthreads();
    n = half;
  }
  const T result = shared[0];
  __syncthreads();
  return result;
}

#else

#define TESSERA_MEMBER inline __attribute__((always_inline))

template <class Op, class T>
TESSERA_FN void start(T* to, long n) {
  for (long i = 0; i < n; ++i) to[i] = Op::template start<T>();
}
/// What lanes of T hold: there are no vectors of bool.
template <class T>
struct Lane {
  using Type = T;
};
template <>
struct Lane<bool> {
  using Type = unsigned char;
};
template <class Op>
constexpr bool kPicks = false;
template <>
constexpr bool kPicks<Max> = true;
template <>
constexpr bool kPicks<Min> = true;
/// A register's worth of N elements, or of as many as 64 bytes hold.
template <class T, long N>
struct Wide {
  static constexpr long kWidth = N < 64 / long(sizeof(T)) ? N : 64 / long(sizeof(T));
  static constexpr long kCount = N / kWidth;
  typedef T Vector __attribute__((vector_size(kWidth * sizeof(T)), aligned(alignof(T)), may_alias));
};
/// Lane i meets lane i + L / 2, and so on.
template <class Op, long L, class T>
TESSERA_FN T fold(T* lane) {
  if constexpr (L == 1) {
    return lane[0];
  } else {
    using W = Wide<T, L / 2>;
    auto* v = reinterpret_cast<typename W::Vector*>(lane);
    for (long k = 0; k < W::kCount; ++k) v[k] = Op::join(v[k], v[k + W::kCount]);
    return fold<Op, L / 2>(lane);
  }
}
/// Running totals in L interleaved lanes. Loops leave what each lane is to join in `term`. Maxima
/// of floats are taken as if there were no NaN, and where there was one is kept beside them: the
/// next element waits for one instruction and not for three.
template <class Op, class Element, long L>
struct Lanes {
  using T = typename Lane<Element>::Type;
  using W = Wide<T, L>;
  using Vector = typename W::Vector;
  alignas(64) T term[L];
  Vector total[W::kCount];
  static constexpr bool kMayBeNan = kPicks<Op> && T(0.5) != T(0);
  decltype(Vector{} != Vector{}) nan[W::kCount] = {};

  TESSERA_MEMBER Lanes() {
    clear();
    for (long k = 0; k < W::kCount; ++k) total[k] = terms()[k];
  }
  TESSERA_MEMBER Vector* terms() { return reinterpret_cast<Vector*>(term); }
  /// Terms that change nothing.
  TESSERA_MEMBER void clear() {
    for (long l = 0; l < L; ++l) term[l] = Op::template start<Element>();
  }
  TESSERA_MEMBER void join() {
    for (long k = 0; k < W::kCount; ++k) {
      const Vector t = terms()[k];
      if constexpr (kMayBeNan)
        total[k] = Op::prefer(total[k], t), nan[k] |= t != t;
      else
        total[k] = Op::join(total[k], t);
    }
  }
  TESSERA_MEMBER Element folded() {
    for (long k = 0; k < W::kCount; ++k) {
      terms()[k] = total[k];
      if constexpr (kMayBeNan) terms()[k] = nan[k] ? T(fn::nan()) - Vector{} : total[k];
    }
    return fold<Op, L>(term);
  }
};
/// body(i, lane) for i in [begin, end), which leaves the terms of `lanes`.
template <long L, class F, class... Totals>
TESSERA_FN void in_lanes(long begin, long end, F body, Totals&... lanes) {
  long i = begin;
  for (; i + L <= end; i += L) {
#pragma GCC ivdep
    for (long l = 0; l < L; ++l) body(i + l, l);
    (lanes.join(), ...);
  }
  if (i == end) return;
  (lanes.clear(), ...);
#pragma GCC ivdep
  for (long l = 0; l < end - i; ++l) body(i + l, l);
  (lanes.join(), ...);
}
/// Moves what sums over rows have collected on to double precision.
template <class T>
TESSERA_FN void move_on(double* to, T* from, long n) {
#pragma GCC ivdep
  for (long i = 0; i < n; ++i) to[i] += from[i], from[i] = T(0);
}
/// Joins the partial results of all chunks, in order, into those of the first.
template <class Op, class T>
TESSERA_FN void combine(T* first, long stride_bytes, long chunks, long n) {
  for (long c = 1; c < chunks; ++c) {
    const T* next = reinterpret_cast<const T*>(reinterpret_cast<char*>(first) + c * stride_bytes);
#pragma GCC ivdep
    for (long i = 0; i < n; ++i) first[i] = Op::join(first[i], next[i]);
  }
}

#endif

}  // namespace tessera::generated
