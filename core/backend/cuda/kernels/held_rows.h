// Rows that threads hold in registers: what softmax, norms and losses share. Printed after math.h
// and device.h in front of those families. Invariant: the order of a row's sums follows from its
// length, the number of threads and whether it comes in packs, and item j of a thread is the same
// column of every operand.
namespace tessera::device {

/// The columns that a thread has of a row: in packs of 16 bytes (kPacks) or, where those do not
/// fit, one by one.
template <class T, int kThreads, int kItems, bool kPacks>
struct Columns {
  static constexpr int kWidth = kPack<T> > kItems ? kItems : kPack<T>;
  unsigned thread, n;
};
template <class T, int kThreads, int kItems, bool kPacks>
TESSERA_FN unsigned column(const Columns<T, kThreads, kItems, kPacks>& c, int j) {
  constexpr int kWidth = Columns<T, kThreads, kItems, kPacks>::kWidth;
  return kPacks ? (unsigned(j / kWidth) * kThreads + c.thread) * kWidth + unsigned(j % kWidth)
                : unsigned(j) * kThreads + c.thread;
}

/// A row of T in registers, as it lies in memory: 16-bit floats that come in packs stay in words,
/// because registers are words and a half of one costs as much.
template <class T, int kItems, bool kWords>
struct Row {
  T x[kItems];
};
template <class T, int kItems>
struct Row<T, kItems, true> {
  unsigned words[kItems / 2];
};
template <class T, bool kPacks>
inline constexpr bool kInWords = kPacks && sizeof(T) == 2;

template <class T, int kItems>
TESSERA_FN Compute<T> at(const Row<T, kItems, false>& r, int j, unsigned) {
  return widen(r.x[j]);
}
TESSERA_FN float widen_half(unsigned word, int half, BF16) {
  return fn::from_word(half ? word & 0xffff0000u : word << 16);
}
TESSERA_FN float widen_half(unsigned word, int half, F16) {
  return widen(F16{static_cast<unsigned short>(half ? word >> 16 : word)});
}
template <class T, int kItems>
TESSERA_FN float at(const Row<T, kItems, true>& r, int j, unsigned) {
  return widen_half(r.words[j / 2], j % 2, T());
}

/// Reads a pack into items j, j + 1, .. of a row.
template <int kWidth, class T, int kItems, bool kWords>
TESSERA_FN void read_pack(Row<T, kItems, kWords>& row, int j, const T* from) {
  if constexpr (kWords) {
    const auto p = load<kWidth / 2>(reinterpret_cast<const unsigned*>(from));
#pragma unroll
    for (int l = 0; l < kWidth / 2; ++l) row.words[j / 2 + l] = p.of[l];
  } else {
    const auto p = load<kWidth>(from);
#pragma unroll
    for (int l = 0; l < kWidth; ++l) row.x[j + l] = p.of[l];
  }
}
template <class T, int kThreads, int kItems>
TESSERA_FN void read(Row<T, kItems, false>& row, const Columns<T, kThreads, kItems, false>& c,
                     const T* from) {
#pragma unroll
  for (int j = 0; j < kItems; ++j)
    if (const unsigned k = column(c, j); k < c.n) row.x[j] = from[k];
}
template <class T, int kThreads, int kItems, bool kWords>
TESSERA_FN void read(Row<T, kItems, kWords>& row, const Columns<T, kThreads, kItems, true>& c,
                     const T* from) {
  constexpr int kWidth = Columns<T, kThreads, kItems, true>::kWidth;
#pragma unroll
  for (int j = 0; j < kItems; j += kWidth)
    if (const unsigned k = column(c, j); k < c.n) read_pack<kWidth>(row, j, from + k);
}
/// A row of ones.
template <class T, int kItems>
TESSERA_FN void set_ones(Row<T, kItems, false>& row) {
#pragma unroll
  for (int j = 0; j < kItems; ++j) row.x[j] = Narrow<T>::from(1.0f);
}
template <class T, int kItems>
TESSERA_FN void set_ones(Row<T, kItems, true>& row) {
#pragma unroll
  for (int j = 0; j < kItems / 2; ++j) row.words[j] = narrow_pair(1.0f, 1.0f, T());
}
/// Calls f(j, k) for every item j of the thread that is a column k of the row. A pack has one test.
template <class T, int kThreads, int kItems, bool kPacks, class F>
TESSERA_FN void each(const Columns<T, kThreads, kItems, kPacks>& c, F f) {
  constexpr int kWidth = Columns<T, kThreads, kItems, kPacks>::kWidth;
  if constexpr (kPacks) {
#pragma unroll
    for (int j = 0; j < kItems; j += kWidth)
      if (const unsigned k = column(c, j); k < c.n) {
#pragma unroll
        for (int l = 0; l < kWidth; ++l) f(j + l, k + unsigned(l));
      }
  } else {
#pragma unroll
    for (int j = 0; j < kItems; ++j)
      if (const unsigned k = column(c, j); k < c.n) f(j, k);
  }
}
/// Stores f(0), f(1), .. as a pack, of which 16-bit floats are rounded by pairs.
template <int kWidth, class T, class F>
TESSERA_FN void store_pack(T* to, F f) {
  if constexpr (sizeof(T) == 2 && kWidth % 2 == 0) {
    Pack<unsigned, kWidth / 2> p;
#pragma unroll
    for (int l = 0; l < kWidth; l += 2) p.of[l / 2] = narrow_pair(f(l), f(l + 1), T());
    *reinterpret_cast<Pack<unsigned, kWidth / 2>*>(to) = p;
  } else {
    Pack<T, kWidth> p;
#pragma unroll
    for (int l = 0; l < kWidth; ++l) p.of[l] = Narrow<T>::from(f(l));
    store<T, kWidth>(to, p);
  }
}
/// to[k] = f(j, k).
template <class T, int kThreads, int kItems, bool kPacks, class F>
TESSERA_FN void write(const Columns<T, kThreads, kItems, kPacks>& c, T* to, F f) {
  constexpr int kWidth = Columns<T, kThreads, kItems, kPacks>::kWidth;
  if constexpr (kPacks) {
#pragma unroll
    for (int j = 0; j < kItems; j += kWidth)
      if (const unsigned k = column(c, j); k < c.n)
        store_pack<kWidth>(to + k, [&](int l) { return f(j + l, k + unsigned(l)); });
  } else {
    each(c, [&](int j, unsigned k) { to[k] = Narrow<T>::from(f(j, k)); });
  }
}
/// to[k] = f(j, k, weight[k], bias[k]), where a weight that is null is 1 and a bias 0.
template <class T, int kThreads, int kItems, bool kPacks, class F>
TESSERA_FN void write(const Columns<T, kThreads, kItems, kPacks>& c, T* to, const T* weight,
                      const T* bias, F f) {
  using C = Compute<T>;
  constexpr int kWidth = Columns<T, kThreads, kItems, kPacks>::kWidth;
  if constexpr (kPacks) {
#pragma unroll
    for (int j = 0; j < kItems; j += kWidth)
      if (const unsigned k = column(c, j); k < c.n) {
        Pack<T, kWidth> w, b;
        if (weight) w = load<kWidth>(weight + k);
        if (bias) b = load<kWidth>(bias + k);
        store_pack<kWidth>(to + k, [&](int l) {
          return f(j + l, k + unsigned(l), weight ? widen(w.of[l]) : C(1),
                   bias ? widen(b.of[l]) : C(0));
        });
      }
  } else {
    each(c, [&](int j, unsigned k) {
      to[k] =
          Narrow<T>::from(f(j, k, weight ? widen(weight[k]) : C(1), bias ? widen(bias[k]) : C(0)));
    });
  }
}

/// A row that is too long for registers: read from memory at each use.
template <class T>
struct LongRow {
  const T* x;
};
template <class T, int kThreads>
struct LongColumns {
  unsigned thread, n;
};
template <class T, int kThreads, class F>
TESSERA_FN void each(const LongColumns<T, kThreads>& c, F f) {
  for (unsigned k = c.thread; k < c.n; k += kThreads) f(0, k);
}
template <class T, int kThreads, class F>
TESSERA_FN void write(const LongColumns<T, kThreads>& c, T* to, F f) {
  each(c, [&](int j, unsigned k) { to[k] = Narrow<T>::from(f(j, k)); });
}
template <class T, int kThreads, class F>
TESSERA_FN void write(const LongColumns<T, kThreads>& c, T* to, const T* weight, const T* bias,
                      F f) {
  using C = Compute<T>;
  write(c, to, [&](int j, unsigned k) {
    return f(j, k, weight ? widen(weight[k]) : C(1), bias ? widen(bias[k]) : C(0));
  });
}
template <class T>
TESSERA_FN Compute<T> at(const LongRow<T>& r, int, unsigned k) {
  return widen(r.x[k]);
}

/// What a kernel needs of its way to hold rows: as many rows share a block as have room in 256
/// threads where a warp or a part of it has a row.
template <class T, int kThreads_, int kItems_, bool kPacks>
struct Held {
  using Element = T;
  using C = Compute<T>;
  using Cols = Columns<T, kThreads_, kItems_, kPacks>;
  using R = Row<T, kItems_, kInWords<T, kPacks>>;
  static constexpr int kThreads = kThreads_, kItems = kItems_;
  static constexpr bool kWords = kInWords<T, kPacks>;
  static constexpr unsigned kRows = kThreads <= int(kWarp) ? 256 / kThreads : 1;
  TESSERA_FN Cols columns(unsigned n) { return {threadIdx.x % kThreads, n}; }
  TESSERA_FN void fetch(R& row, const Cols& c, const T* from) { read(row, c, from); }
};
template <class T, int kThreads_, bool kPacks>
struct Held<T, kThreads_, 0, kPacks> {
  using Element = T;
  using C = Compute<T>;
  using Cols = LongColumns<T, kThreads_>;
  using R = LongRow<T>;
  static constexpr int kThreads = kThreads_, kItems = 0;
  static constexpr unsigned kRows = 1;
  TESSERA_FN Cols columns(unsigned n) { return {threadIdx.x, n}; }
  TESSERA_FN void fetch(R& row, const Cols&, const T* from) { row.x = from; }
};
/// Whether the thread writes what a row has one of. A row that is not there has no columns.
template <class Cols>
TESSERA_FN bool leads(const Cols& c) {
  return c.thread == 0 && c.n > 0;
}

/// The maximum of what is no NaN.
struct Top {
  template <class T>
  TESSERA_FN T start() {
    return T(-fn::inf());
  }
  TESSERA_FN float join(float a, float b) { return ::fmaxf(a, b); }
  TESSERA_FN double join(double a, double b) { return ::fmax(a, b); }
};
/// Joins over the threads that share a row; all threads of a warp call it.
template <class Op, class H, class T>
TESSERA_FN T join(T x) {
  if constexpr (H::kThreads > int(kWarp)) {
    return block_join<Op, H::kThreads>(x);
  } else {
#pragma unroll
    for (unsigned lanes = H::kThreads / 2; lanes > 0; lanes /= 2)
      x = Op::join(x, from_lane(x, lanes));
    return x;
  }
}
/// The sum of f(j, k) over a row.
template <class H, class F>
TESSERA_FN typename H::C sum(const typename H::Cols& c, F f) {
  using C = typename H::C;
  C total = C(0);
  each(c, [&](int j, unsigned k) { total += f(j, k); });
  return join<Sum, H>(total);
}

/// exp(x) within 1 ulp for x <= 80, but 0 where x is below -87.68, without a branch. NaN stays. The
/// polynomial is that of expm1_core.
TESSERA_FN float exp_to_zero(float x) {
  x = max_or_nan(x, -88.25f);  // k is -127 there and the scale 0
  const float shifted = fn::fma(x, 1.44269502f, fn::kShifter + 127.0f);
  const float k = shifted - (fn::kShifter + 127.0f);
  const float r = fn::fma(k, 1.90465421e-9f, fn::fma(k, -0.693147182f, x));
  float p = 0.00138419482f;
  p = fn::fma(p, r, 0.00836769957f);
  p = fn::fma(p, r, 0.0416677147f);
  p = fn::fma(p, r, 0.166665345f);
  p = fn::fma(p, r, 0.49999997f);
  p = fn::fma(p, r * r, r);
  const float scale = fn::power_of_two(shifted);
  return fn::fma(p, scale, scale);
}
TESSERA_FN double exp_to_zero(double x) { return fn::exp(x); }
/// The same for rows of T: near enough for 16-bit floats, by a fifth of the instructions.
template <class T>
TESSERA_FN Compute<T> exp_in_row(Compute<T> x) {
  if constexpr (sizeof(T) == 2)
    return about_exp2(x * 1.44269502f);
  else
    return exp_to_zero(x);
}

/// The maximum of a row but for NaN, and the sum of exp(x - top), which is NaN where an x is. A row
/// in registers keeps its exponentials.
template <class H>
struct Exponentials {
  using C = typename H::C;
  const typename H::R& x;
  C top, total;
  C of[H::kItems ? H::kItems : 1];
};
template <class H>
TESSERA_FN Exponentials<H> exponentials(const typename H::Cols& c, const typename H::R& x) {
  using C = typename H::C;
  Exponentials<H> e{x, Top::start<C>(), C(0), {}};
  each(c, [&](int j, unsigned k) { e.top = Top::join(e.top, at(x, j, k)); });
  e.top = join<Top, H>(e.top);
  e.total = sum<H>(c, [&](int j, unsigned k) {
    const C value = exp_in_row<typename H::Element>(at(x, j, k) - e.top);
    if constexpr (H::kItems != 0) e.of[j] = value;
    return value;
  });
  return e;
}
template <class H>
TESSERA_FN typename H::C at(const Exponentials<H>& e, int j, unsigned k) {
  if constexpr (H::kItems != 0)
    return e.of[j];
  else
    return exp_in_row<typename H::Element>(at(e.x, j, k) - e.top);
}

/// Calls f(row, n) for this thread's row of n columns. All threads of a warp call it: those whose
/// row is not there, for the last row and without columns.
template <class H, class F>
TESSERA_FN void own_row(unsigned rows, unsigned n, F f) {
  const unsigned first = blockIdx.x * H::kRows + threadIdx.x / kWarp * kWarp / H::kThreads;
  if (H::kRows > 1 && first >= rows) return;  // the whole warp
  const unsigned row = blockIdx.x * H::kRows + (H::kRows > 1 ? threadIdx.x / H::kThreads : 0);
  f(static_cast<long>(row < rows ? row : rows - 1), row < rows ? n : 0);
}

}  // namespace tessera::device
