// Sums and other joins of sources that an index sends to the same place: scatter_sum, scatter_prod,
// scatter_amax, scatter_amin, the gradient of an embedding. An index that is a vector, or that has
// few long lines, has been sorted (sort.cu), so the sources of a place are neighbours and one
// thread joins them; otherwise a thread has a whole line along the dim. After convert.h and
// device.h. Invariant: sources meet in the order of the index, as on the CPU, so results have its
// bits where arithmetic does.
namespace tessera::device {

inline constexpr int kSegmentThreads = 256;

/// Elements that a thread has of a row where rows consist of packs.
template <class In, class Out>
inline constexpr int kSegmentPack = 16 / int(sizeof(In) > sizeof(Out) ? sizeof(In) : sizeof(Out));

template <class Op, class T, int kWidth>
TESSERA_FN void join_pack(Compute<T> (&total)[kWidth], const Pack<T, kWidth>& x) {
#pragma unroll
  for (int l = 0; l < kWidth; ++l) total[l] = Op::join(total[l], widen(x.of[l]));
}
/// Joins to `total` the packs at from[order[k] * stride] of the segment that begins at position j.
/// The next key and place are on their way while a pack is.
template <class Op, class In, int kWidth>
TESSERA_FN void join_segment(Compute<In> (&total)[kWidth], const SegmentCall& c, const In* from,
                             unsigned j, long key) {
  const long stride = long(c.inner.divisor) * kWidth;
  int place = c.order[j];
  for (;;) {
    const Pack<In, kWidth> x = load<kWidth>(from + place * stride);
    const bool more = ++j < c.n.divisor && c.keys[j] == key;
    if (more) place = c.order[j];
    join_pack<Op>(total, x);
    if (!more) break;
  }
}

/// `order` [n] are positions of the index in order of `keys` [n]. A thread has column i, of kWidth
/// elements, of one outer element for the position j that begins a segment; it joins all of the
/// segment to what is there, or to zeros.
template <class Op, class In, class Out, int kWidth>
TESSERA_FN void join_segments(const SegmentCall& c) {
  const unsigned e = blockIdx.x * kSegmentThreads + threadIdx.x;
  if (e >= c.count) return;
  const unsigned line = quotient(e, c.inner), i = e - line * c.inner.divisor;
  const unsigned o = quotient(line, c.n), j = line - o * c.n.divisor;
  const long key = c.keys[j];
  if (j > 0 && c.keys[j - 1] == key) return;
  const long row = key - c.begin;
  if (key < 0 || key >= c.extent) {
    if (i == 0) report(c.report, long(c.order[j]), key);
    return;
  }
  if (key == c.ignored || row < 0 || row >= c.rows) return;
  Out* to = static_cast<Out*>(c.out) + ((long(o) * c.rows + row) * c.inner.divisor + i) * kWidth;
  const In* from =
      static_cast<const In*>(c.in) + (long(o) * c.n.divisor * c.inner.divisor + i) * kWidth;
  Compute<In> total[kWidth] = {};
  Pack<Out, kWidth> there{};
  if (!c.fresh) {
    there = load<kWidth>(to);
#pragma unroll
    for (int l = 0; l < kWidth; ++l)
      if (!c.apart) total[l] = widen(there.of[l]);
  }
  join_segment<Op>(total, c, from, j, key);
  Pack<Out, kWidth> sums;
#pragma unroll
  for (int l = 0; l < kWidth; ++l) sums.of[l] = Narrow<Out>::from(total[l]);
  if (c.apart) {
#pragma unroll
    for (int l = 0; l < kWidth; ++l)
      sums.of[l] = Narrow<Out>::from(widen(there.of[l]) + widen(sums.of[l]));
  }
  store<Out, kWidth>(to, sums);
}

/// `keys` and `order` [outer, inner, n] are the lines of an index [outer, n, inner], each sorted. A
/// thread has position j of a line; where that begins a segment, it joins all of the segment to
/// what is there.
template <class Op, class In, class Out>
TESSERA_FN void join_sorted(const SegmentCall& c) {
  using C = Compute<In>;
  const unsigned e = blockIdx.x * kSegmentThreads + threadIdx.x;
  if (e >= c.count) return;
  const unsigned line = quotient(e, c.n), j = e - line * c.n.divisor;
  const unsigned o = quotient(line, c.inner), i = line - o * c.inner.divisor;
  const long *keys = c.keys + long(line) * c.n.divisor, row = keys[j];
  const int* order = c.order + long(line) * c.n.divisor;
  if (j > 0 && keys[j - 1] == row) return;
  const long first = long(o) * c.n.divisor * c.inner.divisor + i;
  if (row < 0 || row >= c.extent)
    return report(c.report, first + long(order[j]) * c.inner.divisor, row);
  Out* to = static_cast<Out*>(c.out) + (long(o) * c.rows + row) * c.inner.divisor + i;
  const In* from = static_cast<const In*>(c.in) + first;
  C total = widen(*to);
  for (unsigned k = j; k < c.n.divisor && keys[k] == row; ++k)
    total = Op::join(total, widen(from[long(order[k]) * c.inner.divisor]));
  *to = Narrow<Out>::from(total);
}

/// A thread has the line (o, i) of an index [outer, n, inner] and walks along it. `out` is of the
/// compute type, since sources of one place do not come together.
template <class Op, class In>
TESSERA_FN void join_lines(const SegmentCall& c) {
  using C = Compute<In>;
  const unsigned e = blockIdx.x * kSegmentThreads + threadIdx.x;
  if (e >= c.count) return;
  const unsigned o = quotient(e, c.inner), i = e - o * c.inner.divisor;
  for (unsigned k = 0; k < c.n.divisor; ++k) {
    const long at = (long(o) * c.n.divisor + k) * c.inner.divisor + i;
    const long row = c.keys[at];
    if (row < 0 || row >= c.extent) {
      report(c.report, at, row);
      continue;
    }
    C& to = static_cast<C*>(c.out)[(long(o) * c.rows + row) * c.inner.divisor + i];
    to = Op::join(to, widen(static_cast<const In*>(c.in)[at]));
  }
}

}  // namespace tessera::device

// instances: JOIN, IN, OUT
KERNEL(segments, SegmentCall, 256) { join_segments<JOIN, IN, OUT, 1>(c); }
KERNEL(segment_packs, SegmentCall, 256) { join_segments<JOIN, IN, OUT, kSegmentPack<IN, OUT>>(c); }
KERNEL(sorted, SegmentCall, 256) { join_sorted<JOIN, IN, OUT>(c); }
KERNEL(lines, SegmentCall, 256) { join_lines<JOIN, IN>(c); }
