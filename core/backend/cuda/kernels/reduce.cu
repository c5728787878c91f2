// Reductions of [outer, n, inner] to [outer, inner] by six joins. Rows (inner 1) are joined by a
// warp or by a block; columns by threads side by side; long ones are cut into pieces of a fixed
// number of elements whose results a second launch joins. After convert.h and device.h. Invariant:
// the order of a sum follows from the extents and the piece, so launches give the same bits every
// time.
namespace tessera::device {

inline constexpr int kReduceThreads = 256;
inline constexpr int kRowsOfBlock = kReduceThreads / int(kWarp);

template <class T, class C>
TESSERA_FN void write(T* to, C value) {
  *to = Narrow<T>::from(value);
}

// ---- rows ----

/// Joins elements [begin, end) of a row over `kThreads` threads: each takes packs in turn.
template <class Op, class T, int kThreads>
TESSERA_FN Compute<T> join_row(const T* row, unsigned begin, unsigned end, bool packs,
                               unsigned thread) {
  using C = Compute<T>;
  constexpr int kWidth = kPack < T >> 8 ? 8 : kPack<T>;
  C sum = Op::template start<C>();
  unsigned i = begin + thread * kWidth;
  if (packs) {
    for (; i + kWidth <= end; i += kThreads * kWidth) {
      const Pack<T, kWidth> x = load<kWidth>(row + i);
#pragma unroll
      for (int l = 0; l < kWidth; ++l) sum = Op::join(sum, widen(x.of[l]));
    }
    for (unsigned k = i; k < end && k < i + kWidth; ++k) sum = Op::join(sum, widen(row[k]));
  } else {
    for (; i < end; i += kThreads * kWidth)
      for (unsigned k = i; k < end && k < i + kWidth; ++k) sum = Op::join(sum, widen(row[k]));
  }
  return sum;
}

/// A warp for each piece of a row: out[outer, pieces].
template <class Op, class T, class R>
TESSERA_FN void reduce_warps(const ReduceCall& c) {
  const unsigned row = blockIdx.x * kRowsOfBlock + threadIdx.x / kWarp;
  if (row >= c.outer) return;
  const Compute<T> sum = warp_join<Op>(join_row<Op, T, kWarp>(
      static_cast<const T*>(c.in) + long(row) * c.n, 0, c.n, c.packs, threadIdx.x % kWarp));
  if (threadIdx.x % kWarp == 0) write(static_cast<R*>(c.out) + row, sum);
}

/// A block for each piece of a row.
template <class Op, class T, class R>
TESSERA_FN void reduce_rows(const ReduceCall& c) {
  const unsigned row = blockIdx.x / c.pieces, piece = blockIdx.x % c.pieces;
  const unsigned begin = piece * c.piece, end = begin + c.piece < c.n ? begin + c.piece : c.n;
  const Compute<T> sum = block_join<Op, kReduceThreads>(join_row<Op, T, kReduceThreads>(
      static_cast<const T*>(c.in) + long(row) * c.n, begin, end, c.packs, threadIdx.x));
  if (threadIdx.x == 0) write(static_cast<R*>(c.out) + blockIdx.x, sum);
}

// ---- columns ----

/// A block takes 32 columns of a piece of rows: lanes are columns, warps take every eighth row.
/// out[outer, pieces, inner].
template <class Op, class T, class R>
TESSERA_FN void reduce_columns(const ReduceCall& c) {
  using C = Compute<T>;
  __shared__ C sums[kRowsOfBlock][kWarp];
  const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const unsigned column = blockIdx.x * kWarp + lane, piece = blockIdx.y;
  const unsigned begin = piece * c.piece, end = begin + c.piece < c.n ? begin + c.piece : c.n;
  for (unsigned o = blockIdx.z; o < c.outer; o += gridDim.z) {
    C sum = Op::template start<C>();
    if (column < c.inner) {
      const T* in = static_cast<const T*>(c.in) + long(o) * c.n * c.inner + column;
      for (unsigned i = begin + warp; i < end; i += kRowsOfBlock)
        sum = Op::join(sum, widen(in[long(i) * c.inner]));
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && column < c.inner) {
#pragma unroll
      for (int w = 1; w < kRowsOfBlock; ++w) sum = Op::join(sum, sums[w][lane]);
      write(static_cast<R*>(c.out) + (long(o) * c.pieces + piece) * c.inner + column, sum);
    }
    __syncthreads();
  }
}

}  // namespace tessera::device

// instances: JOIN, IN, OUT
KERNEL(warps, ReduceCall, 256) { reduce_warps<JOIN, IN, OUT>(c); }
KERNEL(rows, ReduceCall, 256) { reduce_rows<JOIN, IN, OUT>(c); }
KERNEL(columns, ReduceCall, 256) { reduce_columns<JOIN, IN, OUT>(c); }
