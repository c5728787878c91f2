// What the kernels of attention share: which tile a block has, where rows lie, and who attends to
// whom. Printed after math.h and device.h in front of both families.
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
