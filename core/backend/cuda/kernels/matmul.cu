// Batched matrix products C [m, n] = A [m, k] B [k, n] at any strides. A block makes a tile of C;
// tiles of A and B go through shared memory. `scalar`: each element of C is one chain of products
// and sums along k in the compute type; `exact`: a chain for each leaf of k, and the balanced tree
// of all leaves, as on the CPU. `tensor`: 16-bit floats by the matrix units, summed in f32. Long
// sums may be cut into parts, which the host joins. After device.h. Invariant: the order of a sum
// follows from the sizes alone.
namespace tessera::device {

inline constexpr int kMatmulThreads = 256;

/// What this block makes: a tile of C, which begins `c` elements in, from the sum's elements
/// [begin, end).
template <class T>
struct MatmulTile {
  const T *a, *b;
  long c;
  int row, column, begin, end;
};
template <class T>
TESSERA_FN MatmulTile<T> tile_of(const MatmulCall& c, int tile) {
  const unsigned z = c.first + blockIdx.z, part = z % unsigned(c.parts);
  const Offsets<3> at = offsets<3>(c.batch, z / unsigned(c.parts));
  MatmulTile<T> p;
  p.c = at.of[0] + part * c.part_stride;
  p.a = static_cast<const T*>(c.a) + at.of[1], p.b = static_cast<const T*>(c.b) + at.of[2];
  p.row = int(blockIdx.y) * tile, p.column = int(blockIdx.x) * tile;
  p.begin = int(part) * c.part, p.end = c.k - p.begin < c.part ? c.k : p.begin + c.part;
  return p;
}

// ---- scalar ----

inline constexpr int kTile = 64, kDepth = 16, kEach = 4;

/// Element (r, c) of an operand of `rows` x `columns`, or 0 outside of it.
template <class T>
TESSERA_FN Compute<T> inside(const T* x, const MatmulOperand& o, int r, int rows, int c,
                             int columns) {
  return r < rows && c < columns ? widen(x[r * o.row + c * o.column]) : Compute<T>(0);
}

template <class C>
struct ScalarTiles {
  C a[kDepth][kTile + 4], b[kDepth][kTile + 4];
};
/// Goes on with the chains of 64 x 64 of C by 256 threads, 4 x 4 each, over [begin, end) of k.
template <class T, class C>
TESSERA_FN void chain(C (&sums)[kEach][kEach], const MatmulCall& c, const MatmulTile<T>& p,
                      int begin, int end, ScalarTiles<C>& tiles) {
  const int tx = int(threadIdx.x) % 16, ty = int(threadIdx.x) / 16;
  // Neighbouring threads read neighbouring elements, whichever way an operand lies.
  const bool a_rows = c.left.column == 1, b_rows = c.right.row == 1;
  for (int k = begin; k < end; k += kDepth) {
#pragma unroll
    for (int i = 0; i < kTile * kDepth / kMatmulThreads; ++i) {
      const int e = int(threadIdx.x) + i * kMatmulThreads;
      const int ar = a_rows ? e / kDepth : e % kTile, ak = a_rows ? e % kDepth : e / kTile;
      tiles.a[ak][ar] = inside(p.a, c.left, p.row + ar, c.m, k + ak, end);
      const int bc = b_rows ? e / kDepth : e % kTile, bk = b_rows ? e % kDepth : e / kTile;
      tiles.b[bk][bc] = inside(p.b, c.right, k + bk, end, p.column + bc, c.n);
    }
    __syncthreads();
    const int depth = end - k < kDepth ? end - k : kDepth;
#pragma unroll 4
    for (int l = 0; l < depth; ++l) {
      C left[kEach], right[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        left[i] = tiles.a[l][ty * kEach + i], right[i] = tiles.b[l][tx * kEach + i];
#pragma unroll
      for (int i = 0; i < kEach; ++i)
#pragma unroll
        for (int j = 0; j < kEach; ++j)
          if constexpr (kIsInteger<C>)
            sums[i][j] += left[i] * right[j];
          else
            sums[i][j] = fn::fma(left[i], right[j], sums[i][j]);
    }
    __syncthreads();
  }
}
template <class T, class C>
TESSERA_FN void put(const C (&sums)[kEach][kEach], const MatmulCall& c, const MatmulTile<T>& p) {
  const int tx = int(threadIdx.x) % 16, ty = int(threadIdx.x) / 16;
#pragma unroll
  for (int i = 0; i < kEach; ++i)
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int r = p.row + ty * kEach + i, q = p.column + tx * kEach + j;
      if (r < c.m && q < c.n)
        static_cast<T*>(c.c)[p.c + r * c.result.row + q * c.result.column] =
            Narrow<T>::from(sums[i][j]);
    }
}

template <class T>
TESSERA_FN void matmul_scalar(const MatmulCall& c) {
  using C = Compute<T>;
  __shared__ ScalarTiles<C> tiles;
  const auto p = tile_of<T>(c, kTile);
  C sums[kEach][kEach] = {};
  chain(sums, c, p, p.begin, p.end, tiles);
  put(sums, c, p);
}

/// Leaves are joined as a number counts: leaf i ends as many pairs as i has ones at its end.
template <class T>
TESSERA_FN void matmul_exact(const MatmulCall& c) {
  using C = Compute<T>;
  __shared__ ScalarTiles<C> tiles;
  const auto p = tile_of<T>(c, kTile);
  const int each = c.k / c.leaves;
  C total[kEach][kEach] = {}, waiting[kMatmulLevels][kEach][kEach] = {};
#pragma unroll 1
  for (int leaf = 0; leaf < c.leaves; ++leaf) {
#pragma unroll
    for (int i = 0; i < kEach; ++i)
#pragma unroll
      for (int j = 0; j < kEach; ++j) total[i][j] = C(0);
    chain(total, c, p, leaf * each, (leaf + 1) * each, tiles);
    bool joins = true;
#pragma unroll
    for (int level = 0; level < kMatmulLevels; ++level) {
      const bool ends = leaf >> level & 1;
#pragma unroll
      for (int i = 0; i < kEach; ++i)
#pragma unroll
        for (int j = 0; j < kEach; ++j)
          if (joins && ends)
            total[i][j] = waiting[level][i][j] + total[i][j];
          else if (joins)
            waiting[level][i][j] = total[i][j];
      joins = joins && ends;
    }
  }
  put(total, c, p);
}

// ---- matrix units ----

inline constexpr int kUnitTile = 128, kUnitDepth = 32, kUnitStages = 4, kPad = 8;
/// Elements between the lines of a tile, which run along k, or along m or n where it is turned: 8
/// lines begin in different banks.
template <bool kTurned>
inline constexpr int kLine = (kTurned ? kUnitTile : kUnitDepth) + kPad;
/// Elements of a tile, of either kind.
inline constexpr int kTileElements = kUnitTile * kLine<false>;

/// Loads [128, 32] of an operand, rows along m or n, without waiting where it comes in packs.
template <bool kTurned, class T>
TESSERA_FN void fetch(T* to, const T* x, long row_stride, long k_stride, int row, int rows, int k,
                      int end, bool packs) {
  constexpr int kAlong = kTurned ? kUnitTile : kUnitDepth;  // elements of a line
  if (packs) {
#pragma unroll
    for (int i = 0; i < kUnitTile * kUnitDepth / 8 / kMatmulThreads; ++i) {
      const int e = (int(threadIdx.x) + i * kMatmulThreads) * 8;
      const int line = e / kAlong, at = e % kAlong, r = kTurned ? at : line,
                l = kTurned ? line : at;
      const bool there = row + r < rows && k + l < end;
      copy_async(to + line * kLine<kTurned> + at,
                 there ? x + (row + r) * row_stride + (k + l) * k_stride : x, there);
    }
  } else {
#pragma unroll 4
    for (int i = 0; i < kUnitTile * kUnitDepth / kMatmulThreads; ++i) {
      const int e = int(threadIdx.x) + i * kMatmulThreads;
      const int line = e / kAlong, at = e % kAlong, r = kTurned ? at : line,
                l = kTurned ? line : at;
      T value = {};
      if (row + r < rows && k + l < end) value = x[(row + r) * row_stride + (k + l) * k_stride];
      to[line * kLine<kTurned> + at] = value;
    }
  }
}
/// Rows [row, row + 16) and elements [l, l + 16) along k of a tile.
template <bool kTurned, class T>
TESSERA_FN FragmentTile fragment(const T* tile, int row, int l) {
  const int quarter = int(threadIdx.x) / 8 % 4, line = int(threadIdx.x) % 8;
  row += quarter % 2 * 8, l += quarter / 2 * 8;
  return load_tile<kTurned>(kTurned ? tile + (l + line) * kLine<true> + row
                                    : tile + (row + line) * kLine<false> + l);
}

/// Writes two neighbours of a row of C, at column q.
template <class To>
TESSERA_FN void put_pair(const MatmulCall& c, long at, int q, float first, float second) {
  To* to = static_cast<To*>(c.c) + at + q * c.result.column;
  const Pack<To, 2> pair = {{Narrow<To>::from(first), Narrow<To>::from(second)}};
  if (c.packs & 4) return store(to, pair);
  to[0] = pair.of[0];
  if (q + 1 < c.n) to[c.result.column] = pair.of[1];
}

/// 128 x 128 of C by 8 warps, 32 x 64 each: 2 x 8 products of tiles for each 16 of k. Of the four
/// tiles of each operand one is read while the others are on their way.
template <class T, bool kTurnedA, bool kTurnedB>
TESSERA_FN void matmul_tensor(const MatmulCall& c) {
  extern __shared__ Pack<unsigned, 4> matmul_shared[];
  T* shared = reinterpret_cast<T*>(matmul_shared);
  const auto p = tile_of<T>(c, kUnitTile);
  const int lane = int(threadIdx.x % kWarp), warp = int(threadIdx.x / kWarp);
  const int g = lane / 4, t = lane % 4, wr = warp / 2 * 32, wc = warp % 2 * 64;
  FragmentC sums[2][8] = {};
  auto fetch_stage = [&](int stage, int k) {
    T* a = shared + stage * 2 * kTileElements;
    if (k < p.end) {
      fetch<kTurnedA>(a, p.a, c.left.row, c.left.column, p.row, c.m, k, p.end, c.packs & 1);
      fetch<kTurnedB>(a + kTileElements, p.b, c.right.column, c.right.row, p.column, c.n, k, p.end,
                      c.packs & 2);
    }
    end_copies();  // of no copies, behind the end: stages are counted by groups
  };
#pragma unroll 1
  for (int s = 0; s + 1 < kUnitStages; ++s) fetch_stage(s, p.begin + s * kUnitDepth);
  int stage = 0;
#pragma unroll 1
  for (int k = p.begin; k < p.end; k += kUnitDepth) {
    wait_copies<kUnitStages - 2>();
    __syncthreads();  // and nobody reads the stage that is filled now any more
    fetch_stage((stage + kUnitStages - 1) % kUnitStages, k + (kUnitStages - 1) * kUnitDepth);
    const T *a = shared + stage * 2 * kTileElements, *b = a + kTileElements;
#pragma unroll
    for (int l = 0; l < kUnitDepth; l += 16) {
      FragmentTile left[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) left[i] = fragment<kTurnedA>(a, wr + i * 16, l);
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        const FragmentTile right = fragment<kTurnedB>(b, wc + j * 8, l);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const FragmentA own = {
              {left[i].word[0], left[i].word[1], left[i].word[2], left[i].word[3]}};
          multiply_add(sums[i][j], own, FragmentB{{right.word[0], right.word[2]}}, T{});
          multiply_add(sums[i][j + 1], own, FragmentB{{right.word[1], right.word[3]}}, T{});
        }
      }
    }
    stage = (stage + 1) % kUnitStages;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int l = 0; l < 4; l += 2) {
        const int r = p.row + wr + i * 16 + g + l / 2 * 8, q = p.column + wc + j * 8 + 2 * t;
        if (r >= c.m || q >= c.n) continue;
        const long at = p.c + r * c.result.row;
        if (c.wide)
          put_pair<float>(c, at, q, sums[i][j].of[l], sums[i][j].of[l + 1]);
        else
          put_pair<T>(c, at, q, sums[i][j].of[l], sums[i][j].of[l + 1]);
      }
}

}  // namespace tessera::device

// instances: MATMUL, one of matmul_scalar, matmul_exact and matmul_tensor for its types; BLOCKS of
// a multiprocessor
KERNEL(matmul, MatmulCall, 256, BLOCKS) { MATMUL(c); }
