// Attention without the matrix of weights in memory, forward and backward, tile by tile (Dao et al.
// 2022, "FlashAttention"): a block holds a tile of queries (or keys, for their gradients) and walks
// over tiles of the other. Operands go through shared memory in the compute type, heads of up to
// HEAD elements. After attention_tiles.h. Invariant: each result has one owner that sums in the
// order of positions, so gradients have the same bits every time.
namespace tessera::device {

inline constexpr int kAttentionThreads = 256, kSide = 16;

/// Shapes of the tiles of C, by 16 x 16 threads: kTile positions, of which a thread has kEach.
template <class C, int kHead, int kTile_>
struct Tiles {
  static constexpr int kTile = kTile_, kEach = kTile / kSide;
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
  /// Behind `before` tiles of heads and `weights_before` of weights.
  TESSERA_FN KeptTile<kTile, kTile>* kept(int before, int weights_before) {
    return reinterpret_cast<KeptTile<kTile, kTile>*>(weights(before, weights_before));
  }
};

/// kTile rows of a head in shared memory, as zeros beyond its extents.
template <class T, int kHead, int kTile, class Heads>
TESSERA_FN void fetch(Heads* to, const AttentionCall& c, const AttentionOperand& o, unsigned head,
                      int first, int rows, int width) {
  const T* x = rows_of<T>(c, o, head);
  for (int e = int(threadIdx.x); e < kTile * kHead; e += kAttentionThreads) {
    const int r = e / kHead, l = e % kHead;
    to[r][l] = first + r < rows && l < width ? widen(x[(first + r) * o.row + l]) : Compute<T>(0);
  }
}
template <class T, class C, int kEach, int kWide>
TESSERA_FN void put(const C (&sums)[kEach][kWide], const AttentionCall& c,
                    const AttentionOperand& o, AttentionTile tile, int rows, int width) {
  T* x = rows_of<T>(c, o, tile.head);
  const int tx = int(threadIdx.x) % kSide, ty = int(threadIdx.x) / kSide;
#pragma unroll
  for (int i = 0; i < kEach; ++i)
#pragma unroll
    for (int j = 0; j < kWide; ++j) {
      const int r = tile.first + ty + kSide * i, l = tx + kSide * j;
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
template <class T, int kHead, int kTile, bool kMasked, bool kDropped>
TESSERA_FN void attention_forward(const AttentionCall& c) {
  using C = Compute<T>;
  using S = Tiles<C, kHead, kTile>;
  constexpr int kEach = S::kEach;
  auto *q = S::heads(0), *k = S::heads(1), *v = S::heads(2);
  auto* p = S::weights(3, 0);
  auto* kept = S::kept(3, 1);
  const int tx = int(threadIdx.x) % kSide, ty = int(threadIdx.x) / kSide;
  const AttentionTile tile = tile_of(c.queries, kTile);
  const int first = tile.first;
  fetch<T, kHead, kTile>(q, c, c.q, tile.head, first, c.queries, c.width);
  C out[kEach][S::kWide] = {}, top[kEach], total[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) top[i] = -fn::inf(), total[i] = C(0);
  const int end = c.causal && first + kTile < c.keys ? first + kTile : c.keys;
  const long mask = kMasked ? mask_of(c, tile.head) : 0;
  if constexpr (kDropped) begin_draws(kept, c, tile.head);
  for (int at = 0; at < end; at += kTile) {
    if constexpr (kMasked)
      if (hidden(c, mask, at, kTile)) continue;
    __syncthreads();
    if constexpr (kDropped) draw<kAttentionThreads>(kept, c, first, at);
    fetch<T, kHead, kTile>(k, c, c.k, tile.head, at, c.keys, c.width);
    fetch<T, kHead, kTile>(v, c, c.v, tile.head, at, c.keys, c.value_width);
    __syncthreads();
    C s[kEach][kEach];
    dots(s, q, k, c.width);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int query = first + ty + kSide * i;
      C best = top[i];
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int key = at + tx + kSide * j;
        s[i][j] = attends(c, query, key)
                      ? masked<kMasked>(c, mask, query, key, s[i][j] * C(c.scale), C(1))
                      : C(-fn::inf());
        best = Max::join(s[i][j], best);
      }
      best = side_join<Max>(best);
      // Where nothing is attended to yet, differences of infinities would be NaN.
      const C reference = best == C(-fn::inf()) ? C(0) : best;
      const C keep = fn::exp(top[i] - reference);
      C sum = C(0);
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const C w = fn::exp(s[i][j] - reference);
        const bool keeps = !kDropped || is_kept(kept, ty + kSide * i, tx + kSide * j);
        p[ty + kSide * i][tx + kSide * j] = keeps ? w : C(0);
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
    const bool none = kMasked && total[i] == C(0);
#pragma unroll
    for (int j = 0; j < S::kWide; ++j) {
      out[i][j] = none ? C(0) : out[i][j] / total[i];
      if constexpr (kDropped) out[i][j] *= C(c.kept);
    }
    if (tx == 0 && query < c.queries)
      static_cast<C*>(c.lse)[long(tile.head) * c.queries + query] =
          none ? C(fn::inf()) : top[i] + fn::log(total[i]);
  }
  put<T>(out, c, c.out, tile, c.queries, c.value_width);
}

/// Weights p and their gradients ds of a tile of queries and one of keys, of which `a` and `b` are
/// queries and keys (or the other way round, kKeys) and `ga`, `gb` cotangents and values. p, after
/// dropout, is written for keys only.
template <bool kKeys, bool kMasked, bool kDropped, int kEach, class C, class Heads, class Weights,
          class Kept>
TESSERA_FN void weights_of(const AttentionCall& c, long mask, const Kept* kept, const Heads* a,
                           const Heads* b, const Heads* ga, const Heads* gb, AttentionTile tile,
                           int second, Weights* p, Weights* ds) {
  const int tx = int(threadIdx.x) % kSide, ty = int(threadIdx.x) / kSide;
  C s[kEach][kEach], dp[kEach][kEach];
  dots(s, a, b, c.width);
  dots(dp, ga, gb, c.value_width);
#pragma unroll
  for (int i = 0; i < kEach; ++i)
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int one = tile.first + ty + kSide * i, other = second + tx + kSide * j;
      const int query = kKeys ? other : one, key = kKeys ? one : other;
      const bool there = attends(c, query, key);
      const long row = long(tile.head) * c.queries + (there ? query : 0);
      const C weight =
          there ? fn::exp(masked<kMasked>(c, mask, query, key, s[i][j] * C(c.scale), C(1)) -
                          static_cast<const C*>(c.lse)[row])
                : C(0);
      C times = C(1);
      if constexpr (kDropped) {
        const int own_place = ty + kSide * i, other_place = tx + kSide * j;
        const bool keeps =
            kKeys ? is_kept(kept, other_place, own_place) : is_kept(kept, own_place, other_place);
        times = keeps ? C(c.kept) : C(0), dp[i][j] = keeps ? dp[i][j] * times : C(0);
      }
      if constexpr (kKeys) p[ty + kSide * i][tx + kSide * j] = weight * times;
      ds[ty + kSide * i][tx + kSide * j] =
          there ? weight * (dp[i][j] - static_cast<const C*>(c.delta)[row]) * C(c.scale) : C(0);
    }
}

/// dq of a tile of queries, or dk and dv of a tile of keys: the block walks over tiles of the
/// other.
template <class T, int kHead, int kTile, bool kKeys, bool kMasked, bool kDropped>
TESSERA_FN void attention_grad(const AttentionCall& c) {
  using C = Compute<T>;
  using S = Tiles<C, kHead, kTile>;
  auto *own = S::heads(0), *own_values = S::heads(1);
  auto *other = S::heads(2), *other_values = S::heads(3);
  auto *ds = S::weights(4, 0), *p = S::weights(4, 1);  // p is there for keys only
  auto* kept = S::kept(4, kKeys ? 2 : 1);
  const AttentionOperand &held = kKeys ? c.k : c.q, &held_values = kKeys ? c.v : c.g;
  const AttentionOperand &walked = kKeys ? c.q : c.k, &walked_values = kKeys ? c.g : c.v;
  const int rows = kKeys ? c.keys : c.queries, others = kKeys ? c.queries : c.keys;
  const AttentionTile tile = tile_of(rows, kTile);
  fetch<T, kHead, kTile>(own, c, held, tile.head, tile.first, rows, c.width);
  fetch<T, kHead, kTile>(own_values, c, held_values, tile.head, tile.first, rows, c.value_width);
  C sums[S::kEach][S::kWide] = {}, value_sums[S::kEach][S::kWide] = {};
  const int begin = kKeys && c.causal ? tile.first : 0;
  const int last = !kKeys && c.causal && tile.first + kTile < others ? tile.first + kTile : others;
  const long mask = kMasked ? mask_of(c, tile.head) : 0;
  const int end = kMasked && kKeys && hidden(c, mask, tile.first, kTile) ? begin : last;
  if constexpr (kDropped) begin_draws(kept, c, tile.head);
  for (int at = begin; at < end; at += kTile) {
    if constexpr (kMasked && !kKeys)
      if (hidden(c, mask, at, kTile)) continue;
    __syncthreads();
    if constexpr (kDropped)
      draw<kAttentionThreads>(kept, c, kKeys ? at : tile.first, kKeys ? tile.first : at);
    fetch<T, kHead, kTile>(other, c, walked, tile.head, at, others, c.width);
    fetch<T, kHead, kTile>(other_values, c, walked_values, tile.head, at, others, c.value_width);
    __syncthreads();
    weights_of<kKeys, kMasked, kDropped, S::kEach, C>(c, mask, kept, own, other, own_values,
                                                      other_values, tile, at, p, ds);
    __syncthreads();
    if constexpr (kKeys)
      weigh<kTile>(value_sums, other_values, [&](int row, int r) { return p[row][r]; });
    weigh<kTile>(sums, other, [&](int row, int r) { return ds[row][r]; });
  }
  put<T>(sums, c, kKeys ? c.dk : c.dq, tile, rows, c.width);
  if constexpr (kKeys) put<T>(value_sums, c, c.dv, tile, rows, c.value_width);
}

}  // namespace tessera::device

// instances: T, HEAD, TILE, MASKED, DROPPED, BOUNDS of a launch
KERNEL(forward, AttentionCall, BOUNDS) { attention_forward<T, HEAD, TILE, MASKED, DROPPED>(c); }
KERNEL(delta, AttentionCall, 256) { attention_delta<T>(c); }
KERNEL(queries, AttentionCall, BOUNDS) { attention_grad<T, HEAD, TILE, false, MASKED, DROPPED>(c); }
KERNEL(keys, AttentionCall, BOUNDS) { attention_grad<T, HEAD, TILE, true, MASKED, DROPPED>(c); }
