// Pointwise ops, casts, selections and copies: a result whose element i is a function of element i
// of each operand, at any strides. Threads take packs of up to 16 bytes where all operands have
// dense innermost loops, else single elements; the index is taken apart by magic numbers. The
// functors are those of the CPU, so f32 results have its bits. After all functors and device.h.
namespace tessera::device {

inline constexpr int kPointwiseThreads = 256;

// ---- operations ----

/// A functor of core/ops/pointwise.def on kOperands elements of storage type T. Where kTraps, an
/// integer divisor of 0 is reported, and 1 takes its place.
template <class F, class T, class R, bool kTraps>
struct Apply1 {
  using Result = R;
  static constexpr int kOperands = 1;
  template <int k>
  using In = T;
  TESSERA_FN R of(const PointwiseCall&, long, Compute<T> x) { return Narrow<R>::from(F::apply(x)); }
};
template <class F, class T, class R, bool kTraps>
struct Apply2 {
  using Result = R;
  static constexpr int kOperands = 2;
  template <int k>
  using In = T;
  TESSERA_FN R of(const PointwiseCall& c, long position, Compute<T> x, Compute<T> y) {
    if constexpr (kTraps && kIsInteger<Compute<T>>)
      if (y == 0) {
        report(c.report, position, 0);
        y = 1;
      }
    return Narrow<R>::from(F::apply(x, y));
  }
};
template <class F, class T, class R, bool kTraps>
struct Apply3 {
  using Result = R;
  static constexpr int kOperands = 3;
  template <int k>
  using In = T;
  TESSERA_FN R of(const PointwiseCall&, long, Compute<T> x, Compute<T> y, Compute<T> z) {
    return Narrow<R>::from(F::apply(x, y, z));
  }
};
/// Conversion from T to R.
template <class T, class R>
struct Cast {
  using Result = R;
  static constexpr int kOperands = 1;
  template <int k>
  using In = T;
  TESSERA_FN R of(const PointwiseCall&, long, Compute<T> x) { return Narrow<R>::from(x); }
};
/// Operand 1 where operand 0, a bool, is true, else operand 2. T is any type of that width.
template <bool kFirst, class Bool, class T>
struct Pick {
  using Type = T;
};
template <class Bool, class T>
struct Pick<true, Bool, T> {
  using Type = Bool;
};
template <class T>
struct Where {
  using Result = T;
  static constexpr int kOperands = 3;
  template <int k>
  using In = typename Pick<k == 0, bool, T>::Type;
  TESSERA_FN T of(const PointwiseCall&, long, long x, Compute<T> y, Compute<T> z) {
    return Narrow<T>::from(x ? y : z);
  }
};

// ---- operands ----

/// N elements of operand k + 1, as they lie in memory until they are needed: registers decide how
/// many reads a thread has on the way.
template <class Op, int k, int N>
struct Loaded {
  using T = typename Op::template In<k>;
  Pack<T, N> of;
  TESSERA_FN Pack<T, N> at(const PointwiseCall& c, long offset, int step) {
    const T* p = static_cast<const T*>(c.in[k].data);
    if (N > 1 && p != nullptr && step != 0) return load<N>(p + offset);
    const T x = p ? p[offset] : Narrow<T>::from(FromBits<Compute<T>>::of(c.in[k].value));
    Pack<T, N> r;
#pragma unroll
    for (int i = 0; i < N; ++i) r.of[i] = x;
    return r;
  }
};

/// N elements of the result at position `i` of the walk, of which each is N elements wide.
template <class Op, int N>
struct Step {
  Loaded<Op, 0, N> a;
  Loaded<Op, Op::kOperands >= 2 ? 1 : 0, N> b;
  Loaded<Op, Op::kOperands >= 3 ? 2 : 0, N> c;
  long at;

  TESSERA_FN void read(const PointwiseCall& p, unsigned i, Step& s) {
    const Offsets<Op::kOperands + 1> o = offsets<Op::kOperands + 1>(p.walk, i);
    s.at = o.of[0];
    s.a.of = Loaded<Op, 0, N>::at(p, o.of[1], p.walk.stride[1][0]);
    if constexpr (Op::kOperands >= 2)
      s.b.of = Loaded<Op, 1, N>::at(p, o.of[2], p.walk.stride[2][0]);
    if constexpr (Op::kOperands >= 3)
      s.c.of = Loaded<Op, 2, N>::at(p, o.of[3], p.walk.stride[3][0]);
  }
  TESSERA_FN void write(const PointwiseCall& p, unsigned i, const Step& s) {
    using R = typename Op::Result;
    Pack<R, N> r;
#pragma unroll
    for (int l = 0; l < N; ++l) {
      const long position = static_cast<long>(i) * N + l;
      if constexpr (Op::kOperands == 1) r.of[l] = Op::of(p, position, widen(s.a.of.of[l]));
      if constexpr (Op::kOperands == 2)
        r.of[l] = Op::of(p, position, widen(s.a.of.of[l]), widen(s.b.of.of[l]));
      if constexpr (Op::kOperands == 3)
        r.of[l] =
            Op::of(p, position, widen(s.a.of.of[l]), widen(s.b.of.of[l]), widen(s.c.of.of[l]));
    }
    store<R, N>(static_cast<R*>(p.out) + s.at, r);
  }
};

/// A block takes kSteps times as many positions as it has threads; all reads come first.
template <class Op, int N, int kSteps>
TESSERA_FN void pointwise(const PointwiseCall& p) {
  const unsigned first = blockIdx.x * (kPointwiseThreads * kSteps) + threadIdx.x;
  if constexpr (kSteps == 1) {
    if (first >= p.walk.count) return;
    Step<Op, N> s;
    Step<Op, N>::read(p, first, s);
    Step<Op, N>::write(p, first, s);
  } else {
    Step<Op, N> s[kSteps];
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
      if (const unsigned i = first + k * kPointwiseThreads; i < p.walk.count)
        Step<Op, N>::read(p, i, s[k]);
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
      if (const unsigned i = first + k * kPointwiseThreads; i < p.walk.count)
        Step<Op, N>::write(p, i, s[k]);
  }
}

}  // namespace tessera::device

// instances: OP, WIDTH elements of a pack, STEPS of a thread
KERNEL(packs, PointwiseCall, 256) { pointwise<OP, WIDTH, STEPS>(c); }
KERNEL(elements, PointwiseCall, 256) { pointwise<OP, 1, 1>(c); }
