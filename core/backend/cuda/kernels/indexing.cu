// Reads and writes by position on [outer, n, inner] around the indexed dim. An index that moves
// with the dim alone (a vector) is never spread out. Elements of `gather`, `scatter` and
// `embedding` are whatever fills 1 to 16 bytes; combining scatters are in segments.cu. After
// convert.h and device.h. Invariant: where several sources meet in one place the last along the
// index wins, whatever order threads run in, because places are claimed by the largest position.
namespace tessera::device {

inline constexpr int kIndexThreads = 256;

/// 16 bytes that are moved together.
struct alignas(16) Quad {
  unsigned word[4];
};

/// Where element `i` of the [outer, n, inner] that the index spans has its partner along the dim;
/// -1 for one that is refused, -2 for one that another part of the table holds.
struct IndexedPlace {
  long o, k, i, row;
};
template <class I>
TESSERA_FN IndexedPlace place_of(const IndexCall& c, unsigned e) {
  const unsigned line = quotient(e, c.inner), i = e - line * c.inner.divisor;
  const unsigned o = quotient(line, c.n), k = line - o * c.n.divisor;
  const long at = c.vector ? long(k) * c.index_stride : long(e);
  const long id = static_cast<const I*>(c.index)[at];
  IndexedPlace p = {long(o), long(k), long(i), id - c.begin};
  if (id < 0 || id >= c.extent) {
    if (i == 0 || !c.vector) report(c.report, c.vector ? long(k) : long(e), id);
    p.row = -1;
  } else if (p.row < 0 || p.row >= c.rows) {
    p.row = -2;
  }
  return p;
}

/// out[o, k, i] = x[o, index, i]; zeros where the index is refused or belongs to another part.
template <class E, class I>
TESSERA_FN void gather(const IndexCall& c) {
  const unsigned e = blockIdx.x * kIndexThreads + threadIdx.x;
  if (e >= c.count) return;
  const IndexedPlace p = place_of<I>(c, e);
  E value = {};
  if (p.row >= 0)
    value = static_cast<const E*>(c.in)[(p.o * c.rows + p.row) * c.inner.divisor + p.i];
  static_cast<E*>(c.out)[e] = value;
}

/// winner[o, index, i] = 1 + the largest k that writes there; `winner` begins as zeros.
template <class I>
TESSERA_FN void claim(const IndexCall& c) {
  const unsigned e = blockIdx.x * kIndexThreads + threadIdx.x;
  if (e >= c.count) return;
  const IndexedPlace p = place_of<I>(c, e);
  if (p.row >= 0)
    atomicMax(static_cast<unsigned*>(c.winner) + (p.o * c.rows + p.row) * c.inner.divisor + p.i,
              static_cast<unsigned>(p.k) + 1);
}
/// out[o, index, i] = x[o, k, i] for the k that has claimed the place.
template <class E, class I>
TESSERA_FN void scatter(const IndexCall& c) {
  const unsigned e = blockIdx.x * kIndexThreads + threadIdx.x;
  if (e >= c.count) return;
  const IndexedPlace p = place_of<I>(c, e);
  if (p.row < 0) return;
  const long to = (p.o * c.rows + p.row) * c.inner.divisor + p.i;
  if (static_cast<const unsigned*>(c.winner)[to] == static_cast<unsigned>(p.k) + 1)
    static_cast<E*>(c.out)[to] = static_cast<const E*>(c.in)[e];
}

/// Indices counted from the end become positions.
TESSERA_FN void wrap(const IndexCall& c) {
  const unsigned e = blockIdx.x * kIndexThreads + threadIdx.x;
  if (e >= c.count) return;
  const long v = static_cast<const long*>(c.index)[e];
  if (v < -c.extent || v >= c.extent) report(c.report, long(e), v);
  static_cast<long*>(c.out)[e] = v < 0 ? v + c.extent : v;
}

}  // namespace tessera::device

// instances: E, an element of 1 to 16 bytes; I, the index's
KERNEL(gather, IndexCall, 256) { gather<E, I>(c); }
KERNEL(claim, IndexCall, 256) { claim<I>(c); }
KERNEL(scatter, IndexCall, 256) { scatter<E, I>(c); }
KERNEL(wrap, IndexCall, 256) { wrap(c); }
