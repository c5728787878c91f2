// Segments of a dim, and products with a matrix in compressed rows (crow, col, values). A thread
// has one element of the result and joins what belongs to it from the first element or edge to the
// last; a sampled product has a warp for each edge. `check` says where a structure is none, before
// anything reads by it. After device.h. Invariant: the order of a sum follows from the structure
// alone; spmm and its extremes have the CPU's.
namespace tessera::device {

inline constexpr unsigned kSparseThreads = 256;

TESSERA_FN unsigned sparse_thread() { return blockIdx.x * kSparseThreads + threadIdx.x; }

/// offsets [rows + 1] rise from 0 to `edges`: the first that does not is reported. So is, in a word
/// of its own, the first of `col` [edges] outside of [0, columns), where there is a col.
TESSERA_FN void check_structure(const SparseCall& c) {
  const unsigned e = sparse_thread();
  if (e >= c.count) return;
  if (e <= c.rows) {
    const long at = c.crow[e];
    const bool bad = (e == 0 ? at != 0 : at < c.crow[e - 1]) || (e == c.rows && at != c.edges);
    if (bad) report(c.report, long(e), at);
  } else {
    const unsigned k = e - c.rows - 1;
    const long column = c.col[k];
    if (column < 0 || column >= c.columns) report(c.column_report, long(k), column);
  }
}

/// out [outer, rows, inner] = joins of the segments of in [outer, edges, inner].
template <class Op, class T>
TESSERA_FN void join_offsets(const SparseCall& c) {
  using C = Compute<T>;
  const unsigned e = sparse_thread();
  if (e >= c.count) return;
  const unsigned line = quotient(e, c.inner), i = e - line * c.inner.divisor;
  const unsigned o = line / c.rows, row = line % c.rows;
  const T* in = static_cast<const T*>(c.values) + long(o) * c.edges * c.inner.divisor + i;
  C total = Op::template start<C>();
  for (long k = c.crow[row]; k < c.crow[row + 1]; ++k)
    total = Op::join(total, widen(in[k * c.inner.divisor]));
  static_cast<T*>(c.out)[e] = Narrow<T>::from(total);
}

/// values[edge] dense[col[edge], i].
template <class T>
TESSERA_FN Compute<T> term(const SparseCall& c, long edge, unsigned i) {
  return widen(static_cast<const T*>(c.dense)[c.col[edge] * c.inner.divisor + i]) *
         widen(static_cast<const T*>(c.values)[edge]);
}
/// out [rows, inner] = the matrix times dense [columns, inner].
template <class T>
TESSERA_FN void product(const SparseCall& c) {
  const unsigned e = sparse_thread();
  if (e >= c.count) return;
  const unsigned row = quotient(e, c.inner), i = e - row * c.inner.divisor;
  Compute<T> sum = 0;
  for (long k = c.crow[row]; k < c.crow[row + 1]; ++k) sum += term<T>(c, k, i);
  static_cast<T*>(c.out)[e] = Narrow<T>::from(sum);
}
/// The largest (smallest) term, the first of equal ones, and its edge; NaN wins. 0 and -1 for a row
/// without edges.
template <class T, bool kLargest>
TESSERA_FN void extreme_term(const SparseCall& c) {
  using C = Compute<T>;
  const unsigned e = sparse_thread();
  if (e >= c.count) return;
  const unsigned row = quotient(e, c.inner), i = e - row * c.inner.divisor;
  C best = 0;
  long at = -1;
  for (long k = c.crow[row]; k < c.crow[row + 1]; ++k) {
    const C v = term<T>(c, k, i);
    const bool better = kLargest ? !(v <= best) : !(v >= best);
    if (at < 0 || (better && best == best)) best = v, at = k;
  }
  static_cast<T*>(c.out)[e] = Narrow<T>::from(best);
  c.positions[e] = at;
}

/// The row that an edge is in: the last that begins at or before it.
TESSERA_FN unsigned row_of(const SparseCall& c, long edge) {
  unsigned low = 0, high = c.rows;  // crow[low] <= edge < crow[high]
  while (high - low > 1) {
    const unsigned middle = low + (high - low) / 2;
    if (c.crow[middle] <= edge)
      low = middle;
    else
      high = middle;
  }
  return low;
}
/// out [edges] = row of values [rows, inner] times row of dense [columns, inner] that the edge
/// names.
template <class T>
TESSERA_FN void sample_product(const SparseCall& c) {
  using C = Compute<T>;
  const unsigned edge = sparse_thread() / kWarp, lane = threadIdx.x % kWarp;
  if (edge >= c.edges) return;
  const unsigned n = c.n;
  const T* a = static_cast<const T*>(c.values) + long(row_of(c, edge)) * n;
  const T* b = static_cast<const T*>(c.dense) + c.col[edge] * n;
  C sum = 0;
  for (unsigned i = lane; i < n; i += kWarp) sum += widen(a[i]) * widen(b[i]);
  sum = warp_join<Sum>(sum);
  if (lane == 0) static_cast<T*>(c.out)[edge] = Narrow<T>::from(sum);
}

/// The transposed structure from the sorted columns `keys` and where they were, `order`: begins
/// [columns + 1], and for each edge its row and its place in the matrix.
TESSERA_FN void transpose_structure(const SparseCall& c) {
  const unsigned e = sparse_thread();
  if (e >= c.count) return;
  if (e <= c.columns) {
    long low = 0, high = c.edges;
    while (low < high) {
      const long middle = low + (high - low) / 2;
      if (c.keys[middle] < long(e))
        low = middle + 1;
      else
        high = middle;
    }
    static_cast<long*>(c.out)[e] = low;
  }
  if (e < c.edges) {
    const long edge = c.order[e];
    c.row[e] = row_of(c, edge), c.positions[e] = edge;
  }
}

}  // namespace tessera::device

// instances: T
KERNEL(check, SparseCall, 256) { check_structure(c); }
KERNEL(segment_sum, SparseCall, 256) { join_offsets<Sum, T>(c); }
KERNEL(segment_prod, SparseCall, 256) { join_offsets<Prod, T>(c); }
KERNEL(segment_amax, SparseCall, 256) { join_offsets<Max, T>(c); }
KERNEL(segment_amin, SparseCall, 256) { join_offsets<Min, T>(c); }
KERNEL(spmm, SparseCall, 256) { product<T>(c); }
KERNEL(spmm_amax, SparseCall, 256) { extreme_term<T, true>(c); }
KERNEL(spmm_amin, SparseCall, 256) { extreme_term<T, false>(c); }
KERNEL(sddmm, SparseCall, 256) { sample_product<T>(c); }
KERNEL(transpose, SparseCall, 256) { transpose_structure(c); }
