// What kernels share: elements and the types that they are computed in, packs of 16 bytes, division
// by magic numbers, and sums over warps and blocks in a fixed order. Printed after prelude.h,
// convert.h, parameters.h and instructions.h of this folder; includes nothing. Invariant: the order
// of a sum depends on the extents and on the number of threads, never on their timing.
namespace tessera::device {

using namespace cuda;
using fn::BF16;
using fn::F16;

inline constexpr unsigned kWarp = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

// ---- elements ----

using fn::widen;
TESSERA_FN float widen(float x) { return x; }
TESSERA_FN double widen(double x) { return x; }
TESSERA_FN long widen(long x) { return x; }
TESSERA_FN long widen(int x) { return x; }
TESSERA_FN long widen(unsigned short x) { return x; }
TESSERA_FN long widen(unsigned char x) { return x; }
TESSERA_FN long widen(bool x) { return x; }

/// The type that elements of T are computed in: f32 for 16-bit floats, i64 for integers and bool.
template <class T>
using Compute = decltype(widen(T()));

template <class To>
struct Narrow {
  template <class F>
  TESSERA_FN To from(F x) {
    return static_cast<To>(x);
  }
};
template <>
struct Narrow<bool> {
  template <class F>
  TESSERA_FN bool from(F x) {
    return x != F(0);
  }
};
template <>
struct Narrow<unsigned char> {
  template <class F>
  TESSERA_FN unsigned char from(F x) {
    return static_cast<unsigned char>(static_cast<long>(x));
  }
};
template <>
struct Narrow<BF16> {
  template <class F>
  TESSERA_FN BF16 from(F x) {
    return fn::to_bf16(static_cast<float>(x));
  }
};
template <>
struct Narrow<F16> {
  template <class F>
  TESSERA_FN F16 from(F x) {
    return fn::to_f16(static_cast<float>(x));
  }
};

template <class T>
inline constexpr bool kIsInteger = T(1) / T(2) == T(0);

/// A number of type T from its bits.
template <class T>
struct FromBits;
template <>
struct FromBits<float> {
  TESSERA_FN float of(unsigned long long x) { return fn::from_bits(static_cast<int>(x)); }
};
template <>
struct FromBits<double> {
  TESSERA_FN double of(unsigned long long x) { return fn::from_bits64(static_cast<long long>(x)); }
};
template <>
struct FromBits<long> {
  TESSERA_FN long of(unsigned long long x) { return static_cast<long>(x); }
};

// ---- memory ----

/// N elements that are read or written at once; 16 bytes at most.
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T of[N];
};
/// Elements of T in 16 bytes.
template <class T>
inline constexpr int kPack = 16 / int(sizeof(T));

template <int N, class T>
TESSERA_FN Pack<T, N> load(const T* p) {
  return *reinterpret_cast<const Pack<T, N>*>(p);
}
template <class T, int N>
TESSERA_FN void store(T* p, const Pack<T, N>& x) {
  *reinterpret_cast<Pack<T, N>*>(p) = x;
}

TESSERA_FN unsigned quotient(unsigned n, const Divisor& d) {
  const unsigned high =
      static_cast<unsigned>((static_cast<unsigned long long>(n) * d.multiplier) >> 32);
  return (n + high) >> d.shift;
}

/// The offsets of the operands at position `i` of a walk.
template <int kOperands>
struct Offsets {
  long of[kOperands];
};
template <int kOperands>
TESSERA_FN Offsets<kOperands> offsets(const Walk& w, unsigned i) {
  Offsets<kOperands> at = {};
#pragma unroll
  for (int d = 0; d < kWalkDims; ++d) {
    if (d == w.ndim) break;
    const unsigned outer = d + 1 == w.ndim ? 0 : quotient(i, w.extent[d]);
    const unsigned index = i - outer * w.extent[d].divisor;
#pragma unroll
    for (int k = 0; k < kOperands; ++k)
      at.of[k] += static_cast<long>(static_cast<int>(index)) * w.stride[k][d];
    i = outer;
  }
  return at;
}

/// Refuses `value` at `position`, which is below 2^31.
TESSERA_FN void report(Report* to, long position, long value) {
  const long held = value < -0x80000000L ? -0x80000000L : value > 0x7fffffffL ? 0x7fffffffL : value;
  atomicMax(to, (~static_cast<Report>(position) << 32) | static_cast<unsigned>(held));
}

// ---- joins ----

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
struct Product {
  template <class T>
  TESSERA_FN T start() {
    return T(1);
  }
  template <class T>
  TESSERA_FN T join(T a, T b) {
    return a * b;
  }
};
/// NaN is larger than all, here and below smaller than all: it wins.
struct Largest {
  template <class T>
  TESSERA_FN T start() {
    if constexpr (kIsInteger<T>)
      return T(1UL << 63);
    else
      return T(-fn::inf());
  }
  template <class T>
  TESSERA_FN T join(T a, T b) {
    return a > b || a != a ? a : b;
  }
};
struct Smallest {
  template <class T>
  TESSERA_FN T start() {
    if constexpr (kIsInteger<T>)
      return T(~0UL >> 1);
    else
      return T(fn::inf());
  }
  template <class T>
  TESSERA_FN T join(T a, T b) {
    return a < b || a != a ? a : b;
  }
};
struct Any {
  template <class T>
  TESSERA_FN T start() {
    return T(0);
  }
  template <class T>
  TESSERA_FN T join(T a, T b) {
    return T((a != T(0)) | (b != T(0)));
  }
};
struct All {
  template <class T>
  TESSERA_FN T start() {
    return T(1);
  }
  template <class T>
  TESSERA_FN T join(T a, T b) {
    return T((a != T(0)) & (b != T(0)));
  }
};

/// Joins `x` over the lanes of a warp, for all of them: lane i with i ^ 16, then i ^ 8, and so on.
/// Every lane gets the same bits, because joins commute.
template <class Op, class T>
TESSERA_FN T warp_join(T x) {
#pragma unroll
  for (unsigned lanes = kWarp / 2; lanes > 0; lanes /= 2)
    x = Op::join(x, __shfl_xor_sync(kAllLanes, x, lanes));
  return x;
}

/// Joins `x` over `kThreads` threads of a block, for all of them: over lanes, then over warps in
/// order. Every thread of the block calls it.
template <class Op, int kThreads, class T>
TESSERA_FN T block_join(T x) {
  constexpr unsigned kWarps = kThreads / kWarp;
  x = warp_join<Op>(x);
  if constexpr (kWarps > 1) {
    __shared__ T warps[kWarps];
    if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = x;
    __syncthreads();
    x = warps[0];
#pragma unroll
    for (unsigned w = 1; w < kWarps; ++w) x = Op::join(x, warps[w]);
    __syncthreads();
  }
  return x;
}

}  // namespace tessera::device
