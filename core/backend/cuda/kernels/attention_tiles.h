// What the kernels of attention share: which tile a block has, where rows lie, and who attends to
// whom, and which weights are dropped. Printed after math.h, device.h and draws.h in front of both
// families.
namespace tessera::device {

/// What a block has: the head, counted over the batch, and its first position of `positions`. All
/// tiles of a head are neighbours along x, since a grid has few blocks along y.
struct AttentionTile {
  unsigned head;
  int first;
};
TESSERA_FN AttentionTile tile_of(int positions, int tile) {
  const unsigned tiles = unsigned((positions - 1) / tile + 1);
  return {blockIdx.x / tiles, int(blockIdx.x % tiles) * tile};
}
/// The rows of a head in an operand.
template <class T>
TESSERA_FN T* rows_of(const AttentionCall& c, const AttentionOperand& o, unsigned head) {
  return static_cast<T*>(o.data) + long(head / c.heads) * o.batch + long(head % c.heads) * o.head;
}

/// Where the mask of a head begins.
TESSERA_FN long mask_of(const AttentionCall& c, unsigned head) {
  return long(head / c.heads) * c.mask_batch + long(head % c.heads) * c.mask_head;
}
/// Whether there is such a query and key, and the former comes not before the latter.
TESSERA_FN bool attends(const AttentionCall& c, int query, int key) {
  return query < c.queries && key < c.keys && (!c.causal || key <= query);
}
/// The score of a query and a key with the mask's number, times `unit`; -inf where the mask says
/// so.
template <bool kMasked, class C>
TESSERA_FN C masked(const AttentionCall& c, long mask, int query, int key, C score, C unit) {
  if constexpr (kMasked) {
    const long at = mask + query * c.mask_query + key * c.mask_key;
    if (c.mask_is_bool) return static_cast<const bool*>(c.mask)[at] ? score : C(-fn::inf());
    const C more = static_cast<const C*>(c.mask)[at];
    return more < C(kLeastMask) ? C(-fn::inf()) : score + more * unit;
  }
  return score;
}
/// Whether no query attends to `count` keys, at most as many as the block has threads, from `first`
/// on, where all queries have one mask of bools. Every thread has to call it.
TESSERA_FN bool hidden(const AttentionCall& c, long mask, int first, int count) {
  if (!c.mask_is_bool || c.mask_query != 0) return false;
  const int key = first + int(threadIdx.x);
  const bool mine = int(threadIdx.x) < count && key < c.keys;
  return !__syncthreads_or(mine && static_cast<const bool*>(c.mask)[mask + key * c.mask_key]);
}

// ---- dropout ----

/// Which weights of a tile are kept, by fours of neighbouring keys, in shared memory; and where the
/// words of the head's weights lie, which would take registers.
template <int kQueries, int kKeys>
struct KeptTile {
  uint64_t key, hi, first;
  unsigned char fours[kQueries * kKeys / 4];
};
/// Before the first draw of the block, and a barrier.
template <int kQueries, int kKeys>
TESSERA_FN void begin_draws(KeptTile<kQueries, kKeys>* kept, const AttentionCall& c,
                            unsigned head) {
  if (threadIdx.x != 0) return;
  const unsigned batch = head / c.heads, rows = unsigned(c.draw_rows);
  const long row = c.samples ? batch % rows : batch;
  kept->key = stream_of(c);
  kept->hi = c.samples ? uint64_t(c.samples[batch / rows]) : ~uint64_t(0);
  kept->first = uint64_t(c.draw_begin + row * c.draw_batch + long(head % c.heads) * c.draw_head);
}
/// Bit l: the word of element `index` + l is not below the threshold.
TESSERA_FN unsigned kept_of_four(const AttentionCall& c, uint64_t key, uint64_t hi,
                                 uint64_t index) {
  const unsigned skip = unsigned(index % 4);
  const Philox4 p = philox4x32(key, hi, index / 4);
  unsigned bits = 0;
#pragma unroll
  for (int l = 0; l < 4; ++l) bits |= unsigned(p.v[l] >= c.threshold) << l;
  if (skip != 0) {  // the words are of two blocks
    const Philox4 more = philox4x32(key, hi, index / 4 + 1);
#pragma unroll
    for (int l = 0; l < 4; ++l) bits |= unsigned(more.v[l] >= c.threshold) << (4 + l);
  }
  return bits >> skip & 15u;
}
/// Draws the tile from this query and key on; kThreads have to call it.
template <int kThreads, int kQueries, int kKeys>
TESSERA_FN void draw(KeptTile<kQueries, kKeys>* kept, const AttentionCall& c, int query, int key) {
  const uint64_t stream = kept->key, hi = kept->hi, first = kept->first;
#pragma unroll 2
  for (int e = int(threadIdx.x); e < kQueries * kKeys / 4; e += kThreads) {
    const int i = query + e / (kKeys / 4), j = key + e % (kKeys / 4) * 4;
    kept->fours[e] = attends(c, i, j) ? static_cast<unsigned char>(kept_of_four(
                                            c, stream, hi, first + uint64_t(i * c.draw_query + j)))
                                      : 0;
  }
}
template <int kQueries, int kKeys>
TESSERA_FN bool is_kept(const KeptTile<kQueries, kKeys>* kept, int query, int key) {
  return kept->fours[query * (kKeys / 4) + key / 4] >> key % 4 & 1;
}

inline constexpr int kDeltaRows = 8;  // of a block, a warp for each
/// delta [batch heads, queries] = sum over a row of g out; a warp for each row.
template <class T>
TESSERA_FN void attention_delta(const AttentionCall& c) {
  using C = Compute<T>;
  const AttentionTile tile = tile_of(c.queries, kDeltaRows);
  const int query = tile.first + int(threadIdx.x / kWarp);
  if (query >= c.queries) return;
  const T* g = rows_of<T>(c, c.g, tile.head) + query * c.g.row;
  const T* out = rows_of<T>(c, c.out, tile.head) + query * c.out.row;
  C sum = C(0);
  for (int l = int(threadIdx.x % kWarp); l < c.value_width; l += int(kWarp))
    sum += widen(g[l]) * widen(out[l]);
  sum = warp_join<Sum>(sum);
  if (threadIdx.x % kWarp == 0) static_cast<C*>(c.delta)[long(tile.head) * c.queries + query] = sum;
}

}  // namespace tessera::device
