// Attention without the matrix of weights in memory, forward and backward, tile by tile (Dao et al.
// 2022, "FlashAttention"): a block holds a tile of queries (or keys, for their gradients) and walks
// over tiles of the other. Operands go through shared memory in the compute type, heads of up to
// HEAD elements. After math.h and device.h. Invariant: each result has one owner that sums in the
// order of positions, so gradients have the same bits every time.
namespace tessera::device {

inline constexpr int kAttentionThreads = 256, kSide = 16;

/// Shapes of the tiles of C, by 16 x 16 threads: kTile positions, of which a thread has kEach.
template <class C, int kHead>
struct Tiles {
  static constexpr int kTile = sizeof(C) == 8 ? 32 : 64, kEach = kTile / kSide;
  static constexpr int kWide = kHead / kSide;  // elements of a head that a thread has
  using Heads = C[kHead + 1];
  using Weights = C[kTile + 1];
  TESSERA_FN Heads* heads(int i) {
    extern __shared__ double attention_shared[];
    return reinterpret_cast<Heads*>(attention_shared) + i * kTile;
  }
  /// Behind `before` tiles of heads.
  TESSERA_FN Weights* weights(int before, int i) {
    return reinterpret_cast<Weights*>(heads(before)) + i * kTile;
  }
};

/// The head of this block in an operand, and its rows in shared memory as zeros beyond its extents.
template <class T>
TESSERA_FN long head_of(const AttentionCall& c, const AttentionOperand& o) {
  return long(blockIdx.y / c.heads) * o.batch + long(blockIdx.y % c.heads) * o.head;
}
template <class T, int kHead, class Heads>
TESSERA_FN void fetch(Heads* to, const AttentionCall& c, const AttentionOperand& o, int first,
                      int rows, int width) {
  constexpr int kTile = Tiles<Compute<T>, kHead>::kTile;
  const T* x = static_cast<const T*>(o.data) + head_of<T>(c, o);
  for (int e = int(threadIdx.x); e < kTile * kHead; e += kAttentionThreads) {
    const int r = e / kHead, l = e % kHead;
    to[r][l] = first + r < rows && l < width ? widen(x[(first + r) * o.row + l]) : Compute<T>(0);
  }
}
template <class T, int kHead, class C, int kEach, int kWide>
TESSERA_FN void put(const C (&sums)[kEach][kWide], const AttentionCall& c,
                    const AttentionOperand& o, int first, int rows, int width) {
  T* x = static_cast<T*>(o.data) + head_of<T>(c, o);
  const int tx = int(threadIdx.x) % kSide, ty = int(threadIdx.x) / kSide;
#pragma unroll
  for (int i = 0; i < kEach; ++i)
#pragma unroll
    for (int j = 0; j < kWide; ++j) {
      const int r = first + ty + kSide * i, l = tx + kSide * j;
      if (r < rows && l < width) x[r * o.row + l] = Narrow<T>::from(sums[i][j]);
    }
}

/// s[i][j] = row (ty + 16 i) of a times row (tx + 16 j) of b, over the width of a head.
template <class C, int kEach, class Heads>
TESSERA_FN void dots(C (&s)[kEach][kEach], const Heads* a, const Heads* b, int width) {
  const int tx = int(threadIdx.x) % kSide, ty = int(threadIdx.x) / kSide;
#pragma unroll
  for (int i = 0; i < kEach; ++i)
#pragma unroll
    for (int j = 0; j < kEach; ++j) s[i][j] = C(0);
#pragma unroll 2
  for (int l = 0; l < width; ++l) {
    C x[kEach], y[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) x[i] = a[ty + kSide * i][l], y[i] = b[tx + kSide * i][l];
#pragma unroll
    for (int i = 0; i < kEach; ++i)
#pragma unroll
      for (int j = 0; j < kEach; ++j) s[i][j] = fn::fma(x[i], y[j], s[i][j]);
  }
}
/// sums[i][j] += sum over r of w(ty + 16 i, r) x[r][tx + 16 j].
template <int kTile, class C, int kEach, int kWide, class Heads, class F>
TESSERA_FN void weigh(C (&sums)[kEach][kWide], const Heads* x, F w) {
  const int tx = int(threadIdx.x) % kSide, ty = int(threadIdx.x) / kSide;
#pragma unroll 2
  for (int r = 0; r < kTile; ++r) {
    C y[kWide];
#pragma unroll
    for (int j = 0; j < kWide; ++j) y[j] = x[r][tx + kSide * j];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const C p = w(ty + kSide * i, r);
#pragma unroll
      for (int j = 0; j < kWide; ++j) sums[i][j] = fn::fma(p, y[j], sums[i][j]);
    }
  }
}
/// Joins over the 16 threads that share rows.
template <class Op, class C>
TESSERA_FN C side_join(C x) {
#pragma unroll
  for (int lanes = kSide / 2; lanes > 0; lanes /= 2)
    x = Op::join(x, __shfl_xor_sync(kAllLanes, x, lanes));
  return x;
}
TESSERA_FN bool attends(const AttentionCall& c, int query, int key) {
  return query < c.queries && key < c.keys && (!c.causal || key <= query);
}

template <class T, int kHead>
TESSERA_FN void attention_forward(const AttentionCall& c) {
  using C = Compute<T>;
  using S = Tiles<C, kHead>;
  constexpr int kTile = S::kTile, kEach = S::kEach;
  auto *q = S::heads(0), *k = S::heads(1), *v = S::heads(2);
  auto* p = S::weights(3, 0);
  const int tx = int(threadIdx.x) % kSide, ty = int(threadIdx.x) / kSide;
  const int first = int(blockIdx.x) * kTile;
  fetch<T, kHead>(q, c, c.q, first, c.queries, c.width);
  C out[kEach][S::kWide] = {}, top[kEach], total[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) top[i] = -fn::inf(), total[i] = C(0);
  const int end = c.causal && first + kTile < c.keys ? first + kTile : c.keys;
  for (int at = 0; at < end; at += kTile) {
    __syncthreads();
    fetch<T, kHead>(k, c, c.k, at, c.keys, c.width);
    fetch<T, kHead>(v, c, c.v, at, c.keys, c.value_width);
    __syncthreads();
    C s[kEach][kEach];
    dots(s, q, k, c.width);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int query = first + ty + kSide * i;
      C best = top[i];
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        s[i][j] = attends(c, query, at + tx + kSide * j) ? s[i][j] * C(c.scale) : C(-fn::inf());
        best = Largest::join(s[i][j], best);
      }
      best = side_join<Largest>(best);
      // Where nothing is attended to yet, differences of infinities would be NaN.
      const C reference = best == C(-fn::inf()) ? C(0) : best;
      const C keep = fn::exp(top[i] - reference);
      C sum = C(0);
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const C w = fn::exp(s[i][j] - reference);
        p[ty + kSide * i][tx + kSide * j] = w;
        sum += w;
      }
      total[i] = total[i] * keep + side_join<Sum>(sum);
      top[i] = best;
#pragma unroll
      for (int j = 0; j < S::kWide; ++j) out[i][j] *= keep;
    }
    __syncthreads();
    weigh<kTile>(out, v, [&](int row, int r) { return p[row][r]; });
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int query = first + ty + kSide * i;
#pragma unroll
    for (int j = 0; j < S::kWide; ++j) out[i][j] = out[i][j] / total[i];
    if (tx == 0 && query < c.queries)
      static_cast<C*>(c.lse)[long(blockIdx.y) * c.queries + query] = top[i] + fn::log(total[i]);
  }
  put<T, kHead>(out, c, c.out, first, c.queries, c.value_width);
}

/// delta [batch heads, queries] = sum over a row of g out; a warp for each row.
template <class T>
TESSERA_FN void attention_delta(const AttentionCall& c) {
  using C = Compute<T>;
  const int query = int(blockIdx.x * (kAttentionThreads / kWarp) + threadIdx.x / kWarp);
  if (query >= c.queries) return;
  const T* g = static_cast<const T*>(c.g.data) + head_of<T>(c, c.g) + query * c.g.row;
  const T* out = static_cast<const T*>(c.out.data) + head_of<T>(c, c.out) + query * c.out.row;
  C sum = C(0);
  for (int l = int(threadIdx.x % kWarp); l < c.value_width; l += int(kWarp))
    sum += widen(g[l]) * widen(out[l]);
  sum = warp_join<Sum>(sum);
  if (threadIdx.x % kWarp == 0)
    static_cast<C*>(c.delta)[long(blockIdx.y) * c.queries + query] = sum;
}

/// Weights p and their gradients ds of a tile of queries and one of keys, of which `a` and `b` are
/// queries and keys (or the other way round, kKeysFirst) and `ga`, `gb` cotangents and values.
template <class T, int kHead, bool kKeysFirst, class Heads, class Weights>
TESSERA_FN void weights_of(const AttentionCall& c, const Heads* a, const Heads* b, const Heads* ga,
                           const Heads* gb, int first, int second, Weights* p, Weights* ds) {
  using C = Compute<T>;
  constexpr int kEach = Tiles<C, kHead>::kEach;
  const int tx = int(threadIdx.x) % kSide, ty = int(threadIdx.x) / kSide;
  C s[kEach][kEach], dp[kEach][kEach];
  dots(s, a, b, c.width);
  dots(dp, ga, gb, c.value_width);
#pragma unroll
  for (int i = 0; i < kEach; ++i)
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int one = first + ty + kSide * i, other = second + tx + kSide * j;
      const int query = kKeysFirst ? other : one, key = kKeysFirst ? one : other;
      const bool there = attends(c, query, key);
      const long row = long(blockIdx.y) * c.queries + (there ? query : 0);
      const C weight =
          there ? fn::exp(s[i][j] * C(c.scale) - static_cast<const C*>(c.lse)[row]) : C(0);
      if (p) p[ty + kSide * i][tx + kSide * j] = weight;
      ds[ty + kSide * i][tx + kSide * j] =
          there ? weight * (dp[i][j] - static_cast<const C*>(c.delta)[row]) * C(c.scale) : C(0);
    }
}

/// dq of a tile of queries.
template <class T, int kHead>
TESSERA_FN void attention_queries(const AttentionCall& c) {
  using C = Compute<T>;
  using S = Tiles<C, kHead>;
  constexpr int kTile = S::kTile;
  auto *q = S::heads(0), *k = S::heads(1), *g = S::heads(2), *v = S::heads(3);
  auto* ds = S::weights(4, 0);
  const int first = int(blockIdx.x) * kTile;
  fetch<T, kHead>(q, c, c.q, first, c.queries, c.width);
  fetch<T, kHead>(g, c, c.g, first, c.queries, c.value_width);
  C dq[S::kEach][S::kWide] = {};
  const int end = c.causal && first + kTile < c.keys ? first + kTile : c.keys;
  for (int at = 0; at < end; at += kTile) {
    __syncthreads();
    fetch<T, kHead>(k, c, c.k, at, c.keys, c.width);
    fetch<T, kHead>(v, c, c.v, at, c.keys, c.value_width);
    __syncthreads();
    weights_of<T, kHead, false>(c, q, k, g, v, first, at,
                                static_cast<typename S::Weights*>(nullptr), ds);
    __syncthreads();
    weigh<kTile>(dq, k, [&](int row, int r) { return ds[row][r]; });
  }
  put<T, kHead>(dq, c, c.dq, first, c.queries, c.width);
}

/// dk and dv of a tile of keys.
template <class T, int kHead>
TESSERA_FN void attention_keys(const AttentionCall& c) {
  using C = Compute<T>;
  using S = Tiles<C, kHead>;
  constexpr int kTile = S::kTile;
  auto *q = S::heads(0), *k = S::heads(1), *g = S::heads(2), *v = S::heads(3);
  auto *p = S::weights(4, 0), *ds = S::weights(4, 1);
  const int first = int(blockIdx.x) * kTile;
  fetch<T, kHead>(k, c, c.k, first, c.keys, c.width);
  fetch<T, kHead>(v, c, c.v, first, c.keys, c.value_width);
  C dk[S::kEach][S::kWide] = {}, dv[S::kEach][S::kWide] = {};
  for (int at = c.causal ? first : 0; at < c.queries; at += kTile) {
    __syncthreads();
    fetch<T, kHead>(q, c, c.q, at, c.queries, c.width);
    fetch<T, kHead>(g, c, c.g, at, c.queries, c.value_width);
    __syncthreads();
    weights_of<T, kHead, true>(c, k, q, v, g, first, at, p, ds);
    __syncthreads();
    weigh<kTile>(dv, g, [&](int row, int r) { return p[row][r]; });
    weigh<kTile>(dk, q, [&](int row, int r) { return ds[row][r]; });
  }
  put<T, kHead>(dk, c, c.dk, first, c.keys, c.width);
  put<T, kHead>(dv, c, c.dv, first, c.keys, c.value_width);
}

}  // namespace tessera::device

// instances: T, HEAD
extern "C" __global__ void __launch_bounds__(256) NAME_forward(tessera::cuda::AttentionCall c) {
  using namespace tessera::device;
  attention_forward<T, HEAD>(c);
}
extern "C" __global__ void __launch_bounds__(256) NAME_delta(tessera::cuda::AttentionCall c) {
  using namespace tessera::device;
  attention_delta<T>(c);
}
extern "C" __global__ void __launch_bounds__(256) NAME_queries(tessera::cuda::AttentionCall c) {
  using namespace tessera::device;
  attention_queries<T, HEAD>(c);
}
extern "C" __global__ void __launch_bounds__(256) NAME_keys(tessera::cuda::AttentionCall c) {
  using namespace tessera::device;
  attention_keys<T, HEAD>(c);
}
