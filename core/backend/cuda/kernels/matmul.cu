// Batched matrix products C [m, n] = A [m, k] B [k, n], or added to C, at any strides. A block
// makes a tile of C; tiles of A and B go through shared memory. `scalar`: each element of C is one
// chain of products and sums along k in the compute type. `tensor`: 16-bit floats by the matrix
// units, summed in f32. Slow beside the vendor's libraries, and right. After device.h. Invariant:
// the order of a sum follows from k alone.
namespace tessera::device {

// ---- scalar ----

inline constexpr int kTile = 64, kDepth = 16, kMatmulThreads = 256, kEach = 4;

/// Element (r, c) of an operand of `rows` x `columns`, or 0 outside of it.
template <class T>
TESSERA_FN Compute<T> inside(const T* x, const MatmulOperand& o, int r, int rows, int c,
                             int columns) {
  return r < rows && c < columns ? widen(x[r * o.row + c * o.column]) : Compute<T>(0);
}
/// This block's matrix of operand k of the walk over batches.
template <class T, int k>
TESSERA_FN const T* matrix_of(const void* data, const MatmulCall& c) {
  return static_cast<const T*>(data) + offsets<3>(c.batch, c.first + blockIdx.z).of[k];
}

/// 64 x 64 of C by 256 threads, 4 x 4 each.
template <class T>
TESSERA_FN void matmul_scalar(const MatmulCall& c) {
  using C = Compute<T>;
  __shared__ C a[kDepth][kTile + 4], b[kDepth][kTile + 4];
  const int row = int(blockIdx.y) * kTile, column = int(blockIdx.x) * kTile;
  const int tx = int(threadIdx.x) % 16, ty = int(threadIdx.x) / 16;
  const T *from_a = matrix_of<T, 1>(c.a, c), *from_b = matrix_of<T, 2>(c.b, c);
  // Neighbouring threads read neighbouring elements, whichever way an operand lies.
  const bool a_rows = c.left.column == 1, b_rows = c.right.row == 1;
  C sums[kEach][kEach] = {};
  for (int k = 0; k < c.k; k += kDepth) {
#pragma unroll
    for (int i = 0; i < kTile * kDepth / kMatmulThreads; ++i) {
      const int e = int(threadIdx.x) + i * kMatmulThreads;
      const int ar = a_rows ? e / kDepth : e % kTile, ak = a_rows ? e % kDepth : e / kTile;
      a[ak][ar] = inside(from_a, c.left, row + ar, c.m, k + ak, c.k);
      const int bc = b_rows ? e / kDepth : e % kTile, bk = b_rows ? e % kDepth : e / kTile;
      b[bk][bc] = inside(from_b, c.right, k + bk, c.k, column + bc, c.n);
    }
    __syncthreads();
    const int depth = c.k - k < kDepth ? c.k - k : kDepth;
#pragma unroll 4
    for (int l = 0; l < depth; ++l) {
      C left[kEach], right[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        left[i] = a[l][ty * kEach + i], right[i] = b[l][tx * kEach + i];
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
  T* out = const_cast<T*>(matrix_of<T, 0>(c.c, c));
#pragma unroll
  for (int i = 0; i < kEach; ++i)
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int r = row + ty * kEach + i, q = column + tx * kEach + j;
      if (r >= c.m || q >= c.n) continue;
      T& to = out[r * c.result.row + q * c.result.column];
      const C old = c.accumulate ? widen(to) : C(0);
      to = Narrow<T>::from(c.accumulate ? old + sums[i][j] : sums[i][j]);
    }
}

// ---- matrix units ----

inline constexpr int kUnitTile = 128, kUnitDepth = 32, kPad = 8;

/// Loads a tile of [128, 32], rows along m or n, into shared memory, without waiting where rows are
/// dense and 16 bytes fit.
template <class T>
TESSERA_FN void load_tile(T (*to)[kUnitDepth + kPad], const T* x, long row_stride, long k_stride,
                          int row, int rows, int k, int depth, bool packs) {
  if (packs) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int e = int(threadIdx.x) + i * kMatmulThreads, r = e / 4, l = e % 4 * 8;
      const bool there = row + r < rows && k + l < depth;
      copy_async(&to[r][l], there ? x + (row + r) * row_stride + (k + l) : x, there);
    }
  } else {
    const bool along = k_stride == 1;
#pragma unroll 4
    for (int i = 0; i < kUnitTile * kUnitDepth / kMatmulThreads; ++i) {
      const int e = int(threadIdx.x) + i * kMatmulThreads;
      const int r = along ? e / kUnitDepth : e % kUnitTile,
                l = along ? e % kUnitDepth : e / kUnitTile;
      T value = {};
      if (row + r < rows && k + l < depth) value = x[(row + r) * row_stride + (k + l) * k_stride];
      to[r][l] = value;
    }
  }
}
template <class T>
TESSERA_FN unsigned pair(const T* at) {
  return *reinterpret_cast<const unsigned*>(at);
}

/// 128 x 128 of C by 8 warps, 32 x 64 each: 2 x 8 products of tiles for each 16 of k. Two tiles of
/// each operand: one is read while the next is on its way.
template <class T>
TESSERA_FN void matmul_tensor(const MatmulCall& c) {
  alignas(16) __shared__ T a[2][kUnitTile][kUnitDepth + kPad];
  alignas(16) __shared__ T b[2][kUnitTile][kUnitDepth + kPad];
  const int row = int(blockIdx.y) * kUnitTile, column = int(blockIdx.x) * kUnitTile;
  const int lane = int(threadIdx.x % kWarp), warp = int(threadIdx.x / kWarp);
  const int g = lane / 4, t = lane % 4, wr = warp / 2 * 32, wc = warp % 2 * 64;
  const T *from_a = matrix_of<T, 1>(c.a, c), *from_b = matrix_of<T, 2>(c.b, c);
  FragmentC sums[2][8] = {};
  auto fetch = [&](int stage, int k) {
    load_tile(a[stage], from_a, c.left.row, c.left.column, row, c.m, k, c.k, c.packs & 1);
    load_tile(b[stage], from_b, c.right.column, c.right.row, column, c.n, k, c.k, c.packs & 2);
    end_copies();
  };
  if (c.k > 0) fetch(0, 0);
  for (int k = 0, stage = 0; k < c.k; k += kUnitDepth, stage ^= 1) {
    if (k + kUnitDepth < c.k) {
      fetch(stage ^ 1, k + kUnitDepth);
      wait_copies<1>();
    } else {
      wait_copies<0>();
    }
    __syncthreads();
#pragma unroll
    for (int l = 0; l < kUnitDepth; l += 16) {
      FragmentA left[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int r = wr + i * 16 + g;
        left[i] = {{pair(&a[stage][r][l + 2 * t]), pair(&a[stage][r + 8][l + 2 * t]),
                    pair(&a[stage][r][l + 2 * t + 8]), pair(&a[stage][r + 8][l + 2 * t + 8])}};
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int q = wc + j * 8 + g;
        const FragmentB right = {
            {pair(&b[stage][q][l + 2 * t]), pair(&b[stage][q][l + 2 * t + 8])}};
#pragma unroll
        for (int i = 0; i < 2; ++i) multiply_add(sums[i][j], left[i], right, T{});
      }
    }
    __syncthreads();
  }
  T* out = const_cast<T*>(matrix_of<T, 0>(c.c, c));
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int l = 0; l < 4; ++l) {
        const int r = row + wr + i * 16 + g + l / 2 * 8, q = column + wc + j * 8 + 2 * t + l % 2;
        if (r >= c.m || q >= c.n) continue;
        T& to = out[r * c.result.row + q * c.result.column];
        to = Narrow<T>::from(c.accumulate ? widen(to) + sums[i][j].of[l] : sums[i][j].of[l]);
      }
}

}  // namespace tessera::device

// instances: MATMUL, matmul_scalar or matmul_tensor; T
extern "C" __global__ void __launch_bounds__(256) NAME_matmul(tessera::cuda::MatmulCall c) {
  using namespace tessera::device;
  MATMUL<T>(c);
}
