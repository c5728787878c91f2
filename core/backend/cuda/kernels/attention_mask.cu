// What a library's attention leaves to its caller: a mask as numbers that the library adds to
// scores, and rows of queries that attend to no key, which are to be zeros. After device.h.
namespace tessera::device {

/// One line of the mask's keys for each warp: numbers, of which none is -inf, and the first key
/// that is attended to, or as many as there are keys.
TESSERA_FN void attention_bias(const AttentionBiasCall& c) {
  const unsigned line = blockIdx.x * 8 + threadIdx.x / kWarp;
  if (line >= c.lines) return;
  const unsigned query = line % c.extents[2], head = line / c.extents[2] % c.extents[1],
                 batch = line / c.extents[2] / c.extents[1];
  const long from = batch * c.steps[0] + head * c.steps[1] + query * c.steps[2];
  float* to = c.bias + long(line) * c.keys;
  int first = c.keys;
  for (int key = int(threadIdx.x % kWarp); key < c.keys; key += int(kWarp)) {
    const long at = from + key * c.steps[3];
    float x = 0;
    bool sees = true;
    if (c.is_bool) {
      sees = static_cast<const bool*>(c.mask)[at];
    } else {
      x = static_cast<const float*>(c.mask)[at];
      sees = !(x < kLeastMask);
    }
    to[key] = sees ? x : kMaskedBias;
    if (sees && key < first) first = key;
  }
  first = warp_join<Min>(first);
  if (threadIdx.x % kWarp == 0) c.first[line] = first;
}

/// Where query t of a head attends to no key: zeros in its row of out, and +inf in lse.
template <class T>
TESSERA_FN void attention_blank(const AttentionBlankCall& c) {
  const long row = long(blockIdx.x) * 256 + threadIdx.x;
  if (row >= c.rows) return;
  const int query = int(row % c.queries), head = int(row / c.queries % c.heads);
  const long batch = row / c.queries / c.heads;
  const int first = c.first[batch * c.steps[0] + head * c.steps[1] + query * c.steps[2]];
  if (c.causal ? first <= query && first < c.keys : first < c.keys) return;
  c.lse[row] = float(fn::inf());
  T* out =
      static_cast<T*>(c.out.data) + batch * c.out.batch + head * c.out.head + query * c.out.row;
  for (int l = 0; l < c.width; ++l) out[l] = Narrow<T>::from(0.0f);
}

}  // namespace tessera::device

// instances: T of out
KERNEL(bias, AttentionBiasCall, 256) { attention_bias(c); }
KERNEL(blank, AttentionBlankCall, 256) { attention_blank<T>(c); }
