// What kernels share beside the functors' joins.h and threads.h: elements and the types that they
// are computed in, and division by magic numbers. Printed after those, prelude.h, convert.h, and
// parameters.h and instructions.h of this folder; includes nothing. Invariant: the order
// of a sum depends on the extents and on the number of threads, never on their timing.
namespace tessera::device {

using namespace cuda;
using fn::BF16;
using fn::F16;
using fn::F8E4M3;
using fn::F8E5M2;

using fn::block_join;
using fn::from_lane;
using fn::kAllLanes;
using fn::kWarp;
using fn::load;
using fn::Max;
using fn::Min;
using fn::Pack;
using fn::Prod;
using fn::store;
using fn::Sum;
using fn::warp_join;

// ---- elements ----

using fn::widen;
TESSERA_FN float widen(float x) { return x; }
TESSERA_FN double widen(double x) { return x; }
TESSERA_FN long widen(long x) { return x; }
TESSERA_FN long widen(int x) { return x; }
TESSERA_FN long widen(unsigned short x) { return x; }
TESSERA_FN long widen(unsigned char x) { return x; }
TESSERA_FN long widen(bool x) { return x; }

/// The type that elements of T are computed in: f32 for floats of 16 and 8 bits, i64 for integers
/// and bool.
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
template <>
struct Narrow<F8E4M3> {
  template <class F>
  TESSERA_FN F8E4M3 from(F x) {
    return fn::to_f8e4m3(static_cast<float>(x));
  }
};
template <>
struct Narrow<F8E5M2> {
  template <class F>
  TESSERA_FN F8E5M2 from(F x) {
    return fn::to_f8e5m2(static_cast<float>(x));
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

/// Elements of T in 16 bytes.
template <class T>
inline constexpr int kPack = 16 / int(sizeof(T));

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

/// Any and All here join numbers, by whether they are zero; those of joins.h join bools.
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

}  // namespace tessera::device
