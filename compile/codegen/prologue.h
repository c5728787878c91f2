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
/// NaN wins, here and in Min.
struct Max {
  template <class T>
  TESSERA_FN T start() {
    return sizeof(T) == 1 ? T(0) : T(0.5) != T(0) ? T(-inf()) : T(1L << 63);
  }
  template <class T>
  TESSERA_FN T join(T a, T b) {
    return a > b || a != a ? a : b;
  }
};
struct Min {
  template <class T>
  TESSERA_FN T start() {
    return sizeof(T) == 1 ? T(1) : T(0.5) != T(0) ? T(inf()) : T(~(1L << 63));
  }
  template <class T>
  TESSERA_FN T join(T a, T b) {
    return a < b || a != a ? a : b;
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

template <class Op, class T>
TESSERA_FN void start(T* to, long n) {
  for (long i = 0; i < n; ++i) to[i] = Op::template start<T>();
}
/// Lane i meets lane i + L / 2, and so on.
template <class Op, long L, class T>
TESSERA_FN T fold(T* lane) {
  if constexpr (L > 1) {
    for (long i = 0; i < L / 2; ++i) lane[i] = Op::join(lane[i], lane[i + L / 2]);
    return fold<Op, L / 2>(lane);
  }
  return lane[0];
}
/// body(i, lane) for i in [begin, end).
template <long L, class F>
TESSERA_FN void in_lanes(long begin, long end, F body) {
  long i = begin;
  for (; i + L <= end; i += L) {
#pragma GCC ivdep
    for (long l = 0; l < L; ++l) body(i + l, l);
  }
#pragma GCC ivdep
  for (long l = 0; l < end - i; ++l) body(i + l, l);
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
