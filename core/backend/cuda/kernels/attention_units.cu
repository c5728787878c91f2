// Attention of 16-bit floats by the matrix units, forward and backward, tile by tile (Dao 2023,
// "FlashAttention-2"). A block of four warps has 64 rows, 16 a warp: queries, or keys where their
// gradients are wanted. It walks over tiles of OTHER rows of the other side, of which one is read
// while the next is on its way to shared memory. Products of a warp's rows with a tile stay in
// registers as FragmentC, and go into the next product, rounded to 16 bits, as FragmentA. After
// attention_tiles.h. Invariant: each result has one owner that sums in the order of positions, so
// gradients have the same bits every time.
namespace tessera::device {

inline constexpr int kUnitRows = 64, kUnitThreads = 128;

/// The block's shared memory: tiles whose lines begin in different banks.
template <class T, int kHead, int kOther>
struct UnitTiles {
  static constexpr int kLine = kHead + 8;
  /// Tile `i`, [64, kHead], of the rows that the block keeps.
  TESSERA_FN T* own(int i) {
    extern __shared__ Pack<unsigned, 4> attention_shared[];
    return reinterpret_cast<T*>(attention_shared) + i * kUnitRows * kLine;
  }
  /// Tile `i`, [kOther, kHead], of a stage, behind `kept` tiles of the block's own.
  TESSERA_FN T* other(int kept, int stage, int i) {
    return own(kept) + (2 * stage + i) * kOther * kLine;
  }
  /// Behind both stages.
  template <int kQueries, int kKeys>
  TESSERA_FN KeptTile<kQueries, kKeys>* kept_weights(int kept) {
    return reinterpret_cast<KeptTile<kQueries, kKeys>*>(other(kept, 2, 0));
  }
};

/// kRows rows of a head, as zeros beyond its extents; without waiting where it comes in packs.
template <int kRows, int kHead, class T>
TESSERA_FN void fetch(T* to, const AttentionCall& c, const AttentionOperand& o, unsigned head,
                      int first, int rows, int width, bool packs) {
  constexpr int kLine = UnitTiles<T, kHead, 0>::kLine;
  const T* x = rows_of<T>(c, o, head);
  if (packs) {
#pragma unroll
    for (int i = 0; i < kRows * kHead / 8 / kUnitThreads; ++i) {
      const int e = (int(threadIdx.x) + i * kUnitThreads) * 8, r = e / kHead, l = e % kHead;
      const bool there = first + r < rows && l < width;
      copy_async(to + r * kLine + l, there ? x + (first + r) * o.row + l : x, there);
    }
  } else {
#pragma unroll 4
    for (int e = int(threadIdx.x); e < kRows * kHead; e += kUnitThreads) {
      const int r = e / kHead, l = e % kHead;
      T value = {};
      if (first + r < rows && l < width) value = x[(first + r) * o.row + l];
      to[r * kLine + l] = value;
    }
  }
}

/// Rows [row, row + 16) and elements [l, l + 16) of a tile; turned, its transpose.
template <int kLine, bool kTurned, class T>
TESSERA_FN FragmentTile unit_tile(const T* tile, int row, int l) {
  const int quarter = int(threadIdx.x) / 8 % 4, line = int(threadIdx.x) % 8;
  row += quarter % 2 * 8, l += quarter / 2 * 8;
  return load_tile<kTurned>(kTurned ? tile + (l + line) * kLine + row
                                    : tile + (row + line) * kLine + l);
}

/// s = rows of this warp times all rows of `other`, over the width of a head.
template <int kHead, int kOther, class T>
TESSERA_FN void unit_dots(FragmentC (&s)[kOther / 8], const T* own, const T* other, int width) {
  constexpr int kLine = UnitTiles<T, kHead, kOther>::kLine;
  const int row = int(threadIdx.x / kWarp) * 16;
#pragma unroll
  for (int j = 0; j < kOther / 8; ++j) s[j] = {};
#pragma unroll
  for (int l = 0; l < kHead; l += 16) {
    if (l >= width) break;
    const FragmentTile x = unit_tile<kLine, false>(own, row, l);
    const FragmentA a = {{x.word[0], x.word[1], x.word[2], x.word[3]}};
#pragma unroll
    for (int j = 0; j < kOther / 8; j += 2) {
      const FragmentTile y = unit_tile<kLine, false>(other, j * 8, l);
      multiply_add(s[j], a, FragmentB{{y.word[0], y.word[2]}}, T{});
      multiply_add(s[j + 1], a, FragmentB{{y.word[1], y.word[3]}}, T{});
    }
  }
}
/// sums [16, width] += w [16, kOther] times the rows of `other`.
template <int kHead, int kOther, class T>
TESSERA_FN void unit_weigh(FragmentC (&sums)[kHead / 8], const FragmentC (&w)[kOther / 8],
                           const T* other, int width) {
  constexpr int kLine = UnitTiles<T, kHead, kOther>::kLine;
#pragma unroll
  for (int l = 0; l < kOther; l += 16) {
    const FragmentC &left = w[l / 8], &right = w[l / 8 + 1];
    const FragmentA a = {
        {narrow_pair(left.of[0], left.of[1], T{}), narrow_pair(left.of[2], left.of[3], T{}),
         narrow_pair(right.of[0], right.of[1], T{}), narrow_pair(right.of[2], right.of[3], T{})}};
#pragma unroll
    for (int j = 0; j < kHead / 8; j += 2) {
      if (j * 8 >= width) break;
      const FragmentTile y = unit_tile<kLine, true>(other, j * 8, l);
      multiply_add(sums[j], a, FragmentB{{y.word[0], y.word[2]}}, T{});
      multiply_add(sums[j + 1], a, FragmentB{{y.word[1], y.word[3]}}, T{});
    }
  }
}

/// Joins over the four threads that share a row.
TESSERA_FN float quad_max(float x) {
  x = max_or_nan(x, __shfl_xor_sync(kAllLanes, x, 1));
  return max_or_nan(x, __shfl_xor_sync(kAllLanes, x, 2));
}
TESSERA_FN float quad_sum(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

/// The first of the two rows, 8 apart, of which this thread has elements of each FragmentC.
TESSERA_FN int row_of_thread(AttentionTile tile) {
  return tile.first + int(threadIdx.x / kWarp) * 16 + int(threadIdx.x % kWarp) / 4;
}
/// And the first of the two columns, neighbours, of the first FragmentC.
TESSERA_FN int column_of_thread() { return int(threadIdx.x) % 4 * 2; }

/// Writes a warp's rows, times `factor` by half; in pairs where the operand comes in packs.
template <class T, int kHead>
TESSERA_FN void put(const FragmentC (&sums)[kHead / 8], const float (&factor)[2],
                    const AttentionCall& c, const AttentionOperand& o, AttentionTile tile, int rows,
                    int width, bool packs) {
  T* x = rows_of<T>(c, o, tile.head);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = row_of_thread(tile) + 8 * half;
    if (r >= rows) break;
#pragma unroll
    for (int j = 0; j < kHead / 8; ++j) {
      const int l = 8 * j + column_of_thread();
      const float first = sums[j].of[2 * half] * factor[half],
                  second = sums[j].of[2 * half + 1] * factor[half];
      T* to = x + r * o.row + l;
      if (packs) {
        if (l < width) *reinterpret_cast<unsigned*>(to) = narrow_pair(first, second, T{});
      } else {
        if (l < width) to[0] = Narrow<T>::from(first);
        if (l + 1 < width) to[1] = Narrow<T>::from(second);
      }
    }
  }
}

inline constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

template <class T, int kHead, int kOther, bool kMasked, bool kDropped>
TESSERA_FN void unit_forward(const AttentionCall& c) {
  using S = UnitTiles<T, kHead, kOther>;
  const AttentionTile tile = tile_of(c.queries, kUnitRows);
  const int row = row_of_thread(tile), column = column_of_thread();
  const int end = c.causal && tile.first + kUnitRows < c.keys ? tile.first + kUnitRows : c.keys;
  auto fetch_stage = [&](int stage, int at) {
    if (at < end) {
      fetch<kOther, kHead>(S::other(1, stage, 0), c, c.k, tile.head, at, c.keys, c.width,
                           c.packs & kPacksK);
      fetch<kOther, kHead>(S::other(1, stage, 1), c, c.v, tile.head, at, c.keys, c.value_width,
                           c.packs & kPacksV);
    }
    end_copies();  // of no copies, behind the end: stages are counted by groups
  };
  fetch<kUnitRows, kHead>(S::own(0), c, c.q, tile.head, tile.first, c.queries, c.width,
                          c.packs & kPacksQ);
  fetch_stage(0, 0);
  const float scale = float(c.scale) * kLog2E;
  const long mask = kMasked ? mask_of(c, tile.head) : 0;
  auto* kept = S::template kept_weights<kUnitRows, kOther>(1);
  if constexpr (kDropped) begin_draws(kept, c, tile.head);
  FragmentC out[kHead / 8] = {};
  float top[2] = {float(-fn::inf()), float(-fn::inf())}, total[2] = {};  // total: of this thread
  int stage = 0;
#pragma unroll 1
  for (int at = 0; at < end; at += kOther, stage ^= 1) {
    fetch_stage(stage ^ 1, at + kOther);
    wait_copies<1>();
    __syncthreads();
    if constexpr (kMasked)
      if (hidden(c, mask, at, kOther)) continue;
    if constexpr (kDropped) {
      draw<kUnitThreads>(kept, c, tile.first, at);
      __syncthreads();
    }
    FragmentC s[kOther / 8];
    unit_dots<kHead, kOther>(s, S::own(0), S::other(1, stage, 0), c.width);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float best = top[half];
#pragma unroll
      for (int j = 0; j < kOther / 8; ++j)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          const int key = at + 8 * j + column + e % 2;
          const int query = row + 8 * half;
          s[j].of[e] = attends(c, query, key)
                           ? masked<kMasked>(c, mask, query, key, s[j].of[e] * scale, kLog2E)
                           : float(-fn::inf());
          best = max_or_nan(best, s[j].of[e]);
        }
      best = quad_max(best);
      // Where nothing is attended to yet, differences of infinities would be NaN.
      const float reference = best == float(-fn::inf()) ? 0.0f : best;
      const float keep = about_exp2(top[half] - reference);
      float sum = 0;
#pragma unroll
      for (int j = 0; j < kOther / 8; ++j)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          sum += s[j].of[e] = about_exp2(s[j].of[e] - reference);
          if constexpr (kDropped)
            if (!is_kept(kept, row + 8 * half - tile.first, 8 * j + column + e % 2))
              s[j].of[e] = 0.0f;
        }
      total[half] = total[half] * keep + sum;
      top[half] = best;
#pragma unroll
      for (int j = 0; j < kHead / 8; ++j)
        out[j].of[2 * half] *= keep, out[j].of[2 * half + 1] *= keep;
    }
    unit_weigh<kHead, kOther>(out, s, S::other(1, stage, 1), c.value_width);
    __syncthreads();
  }
  float inverse[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = quad_sum(total[half]);
    const bool none = kMasked && sum == 0.0f;
    inverse[half] = none ? 0.0f : (kDropped ? float(c.kept) : 1.0f) / sum;
    const int query = row + 8 * half;
    if (column == 0 && query < c.queries)
      static_cast<float*>(c.lse)[long(tile.head) * c.queries + query] =
          none ? float(fn::inf()) : top[half] * kLn2 + fn::log(sum);
  }
  put<T, kHead>(out, inverse, c, c.out, tile, c.queries, c.value_width, c.packs & kPacksOut);
}

/// dq of 64 queries, or dk and dv of 64 keys: the block walks over tiles of the other.
template <class T, int kHead, int kOther, bool kKeys, bool kMasked, bool kDropped>
TESSERA_FN void unit_grad(const AttentionCall& c) {
  using S = UnitTiles<T, kHead, kOther>;
  const AttentionOperand &held = kKeys ? c.k : c.q, &held_values = kKeys ? c.v : c.g;
  const AttentionOperand &walked = kKeys ? c.q : c.k, &walked_values = kKeys ? c.g : c.v;
  const bool held_packs = c.packs & (kKeys ? kPacksK : kPacksQ),
             held_value_packs = c.packs & (kKeys ? kPacksV : kPacksG),
             packs = c.packs & (kKeys ? kPacksQ : kPacksK),
             value_packs = c.packs & (kKeys ? kPacksG : kPacksV);
  const int rows = kKeys ? c.keys : c.queries, others = kKeys ? c.queries : c.keys;
  const AttentionTile tile = tile_of(rows, kUnitRows);
  const int row = row_of_thread(tile), column = column_of_thread();
  const int begin = kKeys && c.causal ? tile.first : 0;
  const int last =
      !kKeys && c.causal && tile.first + kUnitRows < others ? tile.first + kUnitRows : others;
  const long mask = kMasked ? mask_of(c, tile.head) : 0;
  const int end = kMasked && kKeys && hidden(c, mask, tile.first, kUnitRows) ? begin : last;
  auto fetch_stage = [&](int stage, int at) {
    if (at < end) {
      fetch<kOther, kHead>(S::other(2, stage, 0), c, walked, tile.head, at, others, c.width, packs);
      fetch<kOther, kHead>(S::other(2, stage, 1), c, walked_values, tile.head, at, others,
                           c.value_width, value_packs);
    }
    end_copies();
  };
  fetch<kUnitRows, kHead>(S::own(0), c, held, tile.head, tile.first, rows, c.width, held_packs);
  fetch<kUnitRows, kHead>(S::own(1), c, held_values, tile.head, tile.first, rows, c.value_width,
                          held_value_packs);
  fetch_stage(0, begin);
  const float* lse = static_cast<const float*>(c.lse) + long(tile.head) * c.queries;
  const float* delta = static_cast<const float*>(c.delta) + long(tile.head) * c.queries;
  const float scale = float(c.scale) * kLog2E;
  constexpr int kQueries = kKeys ? kOther : kUnitRows, kColumns = kKeys ? kUnitRows : kOther;
  auto* kept = S::template kept_weights<kQueries, kColumns>(2);
  if constexpr (kDropped) begin_draws(kept, c, tile.head);
  FragmentC sums[kHead / 8] = {}, value_sums[kHead / 8] = {};
  int stage = 0;
#pragma unroll 1
  for (int at = begin; at < end; at += kOther, stage ^= 1) {
    fetch_stage(stage ^ 1, at + kOther);
    wait_copies<1>();
    __syncthreads();
    if constexpr (kMasked && !kKeys)
      if (hidden(c, mask, at, kOther)) continue;
    if constexpr (kDropped) {
      draw<kUnitThreads>(kept, c, kKeys ? at : tile.first, kKeys ? tile.first : at);
      __syncthreads();
    }
    const T *other = S::other(2, stage, 0), *other_values = S::other(2, stage, 1);
    FragmentC p[kOther / 8], ds[kOther / 8];
    unit_dots<kHead, kOther>(p, S::own(0), other, c.width);
    unit_dots<kHead, kOther>(ds, S::own(1), other_values, c.value_width);
#pragma unroll
    for (int j = 0; j < kOther / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int one = row + e / 2 * 8, another = at + 8 * j + column + e % 2;
        const int query = kKeys ? another : one, key = kKeys ? one : another;
        const bool there = attends(c, query, key);
        const int safe = there ? query : 0;
        const float weight =
            there ? about_exp2(masked<kMasked>(c, mask, query, key, p[j].of[e] * scale, kLog2E) -
                               lse[safe] * kLog2E)
                  : 0.0f;
        p[j].of[e] = weight;
        if constexpr (kDropped) {
          const int own_place = one - tile.first, other_place = another - at;
          const bool keeps =
              kKeys ? is_kept(kept, other_place, own_place) : is_kept(kept, own_place, other_place);
          p[j].of[e] = keeps ? weight : 0.0f;
          ds[j].of[e] = keeps ? ds[j].of[e] * float(c.kept) : 0.0f;
        }
        ds[j].of[e] = there ? weight * (ds[j].of[e] - delta[safe]) : 0.0f;
      }
    if constexpr (kKeys) unit_weigh<kHead, kOther>(value_sums, p, other_values, c.value_width);
    unit_weigh<kHead, kOther>(sums, ds, other, c.width);
    __syncthreads();
  }
  const float scaled[2] = {float(c.scale), float(c.scale)};
  const float times = kDropped ? float(c.kept) : 1.0f, by_kept[2] = {times, times};
  put<T, kHead>(sums, scaled, c, kKeys ? c.dk : c.dq, tile, rows, c.width,
                c.packs & (kKeys ? kPacksDk : kPacksDq));
  if constexpr (kKeys)
    put<T, kHead>(value_sums, by_kept, c, c.dv, tile, rows, c.value_width, c.packs & kPacksDv);
}

}  // namespace tessera::device

// instances: T, HEAD, TILE, MASKED, DROPPED, BOUNDS of forward
KERNEL(forward, AttentionCall, BOUNDS) { unit_forward<T, HEAD, TILE, MASKED, DROPPED>(c); }
KERNEL(delta, AttentionCall, 256) { attention_delta<T>(c); }
KERNEL(queries, AttentionCall, 128) { unit_grad<T, HEAD, TILE, false, MASKED, DROPPED>(c); }
KERNEL(keys, AttentionCall, 128) { unit_grad<T, HEAD, TILE, true, MASKED, DROPPED>(c); }
