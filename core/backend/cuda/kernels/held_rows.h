// Rows that threads hold in registers: what softmax, norms and losses share. Printed after device.h
// in front of those families. Invariant: sums of a row have an order that depends on its length and
// the number of threads alone, and item j of a thread is the same column of every operand.
namespace tessera::device {

/// The columns that a thread has of a row: in packs of 16 bytes or, where those do not fit, one by
/// one.
template <class T, int kThreads, int kItems>
struct Columns {
  static constexpr int kWidth = kPack<T> > kItems ? kItems : kPack<T>;
  unsigned thread, n;
  bool packs;
};
template <class T, int kThreads, int kItems>
TESSERA_FN unsigned column(const Columns<T, kThreads, kItems>& c, int j) {
  constexpr int kWidth = Columns<T, kThreads, kItems>::kWidth;
  return c.packs ? (unsigned(j / kWidth) * kThreads + c.thread) * kWidth + unsigned(j % kWidth)
                 : unsigned(j) * kThreads + c.thread;
}

/// A row of T in registers, as it lies in memory.
template <class T, int kThreads, int kItems>
struct Row {
  static constexpr int kWidth = Columns<T, kThreads, kItems>::kWidth;
  T x[kItems];
};
template <class T, int kThreads, int kItems>
TESSERA_FN void read(Row<T, kThreads, kItems>& row, const Columns<T, kThreads, kItems>& c,
                     const T* from) {
  constexpr int kWidth = Row<T, kThreads, kItems>::kWidth;
  if (c.packs) {
#pragma unroll
    for (int j = 0; j < kItems; j += kWidth)
      if (const unsigned k = column(c, j); k < c.n) {
        const Pack<T, kWidth> p = load<kWidth>(from + k);
#pragma unroll
        for (int l = 0; l < kWidth; ++l) row.x[j + l] = p.of[l];
      }
  } else {
#pragma unroll
    for (int j = 0; j < kItems; ++j)
      if (const unsigned k = column(c, j); k < c.n) row.x[j] = from[k];
  }
}
/// Calls f(j, k) for every item j of the thread that is a column k of the row.
template <class T, int kThreads, int kItems, class F>
TESSERA_FN void each(const Columns<T, kThreads, kItems>& c, F f) {
#pragma unroll
  for (int j = 0; j < kItems; ++j)
    if (const unsigned k = column(c, j); k < c.n) f(j, k);
}
/// to[k] = f(j, k).
template <class T, int kThreads, int kItems, class F>
TESSERA_FN void write(const Columns<T, kThreads, kItems>& c, T* to, F f) {
  constexpr int kWidth = Columns<T, kThreads, kItems>::kWidth;
  if (c.packs) {
#pragma unroll
    for (int j = 0; j < kItems; j += kWidth)
      if (const unsigned k = column(c, j); k < c.n) {
        Pack<T, kWidth> p;
#pragma unroll
        for (int l = 0; l < kWidth; ++l) p.of[l] = Narrow<T>::from(f(j + l, k + unsigned(l)));
        store<T, kWidth>(to + k, p);
      }
  } else {
    each(c, [&](int j, unsigned k) { to[k] = Narrow<T>::from(f(j, k)); });
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
template <class T, int kThreads, int kItems>
TESSERA_FN Compute<T> at(const Row<T, kThreads, kItems>& r, int j, unsigned) {
  return widen(r.x[j]);
}
template <class T>
TESSERA_FN Compute<T> at(const LongRow<T>& r, int, unsigned k) {
  return widen(r.x[k]);
}

/// What a kernel needs of its way to hold rows.
template <class T, int kThreads_, int kItems>
struct Held {
  using Element = T;
  using C = Compute<T>;
  using Cols = Columns<T, kThreads_, kItems>;
  using R = Row<T, kThreads_, kItems>;
  static constexpr int kThreads = kThreads_;
  TESSERA_FN Cols columns(unsigned n, bool packs) {
    return {kThreads == int(kWarp) ? threadIdx.x % kWarp : threadIdx.x, n, packs};
  }
  TESSERA_FN void fetch(R& row, const Cols& c, const T* from) { read(row, c, from); }
};
template <class T, int kThreads_>
struct Held<T, kThreads_, 0> {
  using Element = T;
  using C = Compute<T>;
  using Cols = LongColumns<T, kThreads_>;
  using R = LongRow<T>;
  static constexpr int kThreads = kThreads_;
  TESSERA_FN Cols columns(unsigned n, bool) { return {threadIdx.x, n}; }
  TESSERA_FN void fetch(R& row, const Cols&, const T* from) { row.x = from; }
};

/// Joins over the threads that share a row.
template <class Op, class H>
TESSERA_FN typename H::C join(typename H::C x) {
  if constexpr (H::kThreads == int(kWarp))
    return warp_join<Op>(x);
  else
    return block_join<Op, H::kThreads>(x);
}
/// The sum of f(j, k) over a row.
template <class H, class F>
TESSERA_FN typename H::C sum(const typename H::Cols& c, F f) {
  using C = typename H::C;
  C total = C(0);
  each(c, [&](int j, unsigned k) { total += f(j, k); });
  return join<Sum, H>(total);
}

/// Calls f(row) for this thread's row, if there is one: a warp of 256 threads has its own.
template <class H, class F>
TESSERA_FN void own_row(unsigned rows, F f) {
  constexpr unsigned kRows = H::kThreads == int(kWarp) ? 256 / kWarp : 1;
  const unsigned row = blockIdx.x * kRows + (kRows > 1 ? threadIdx.x / kWarp : 0);
  if (row < rows) f(static_cast<long>(row));
}

}  // namespace tessera::device
