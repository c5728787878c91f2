// Which random words an element takes: what random tensors, dropout and attention share. Printed
// after core/tensor/philox.h in front of those families. Invariant: the words follow from the key
// and the element's global index alone, and are those of the CPU.
namespace tessera::device {

inline constexpr int kRandomThreads = 256;
/// Pack `step` of this thread, which draws kRandomSteps of them.
TESSERA_FN unsigned pack_of(int step) {
  return (blockIdx.x * kRandomSteps + unsigned(step)) * kRandomThreads + threadIdx.x;
}

/// The stream of a call's key, as on the CPU.
template <class Call>
TESSERA_FN uint64_t stream_of(const Call& c) {
  const long seed = c.key ? c.key[0] : c.seed, number = c.key ? c.key[1] : c.number;
  return stream_key(uint64_t(seed), uint64_t(number));
}

/// The same, drawn once for the block; every thread has to call it.
template <class Call>
TESSERA_FN uint64_t block_key(const Call& c) {
  __shared__ uint64_t key;
  if (threadIdx.x == 0) key = stream_of(c);
  __syncthreads();
  return key;
}

/// The global index of element e of this part: the nest `place` walks over the local extents with
/// strides of the global tensor as operand 0.
TESSERA_FN uint64_t global_index(const RandomCall& c, unsigned e) {
  return uint64_t(c.first + offsets<1>(c.place, e).of[0]);
}

TESSERA_FN uint32_t word_of(uint64_t key, uint64_t hi, uint64_t index) {
  const Philox4 p = philox4x32(key, hi, index / 4);
  const unsigned w = unsigned(index % 4);
  return w == 0 ? p.v[0] : w == 1 ? p.v[1] : w == 2 ? p.v[2] : p.v[3];
}
/// As many words of an aligned group of elements as it has, N of them a multiple of 4.
template <int N>
struct Words {
  uint32_t of[N];
};
template <int N>
TESSERA_FN Words<N> words_of(uint64_t key, uint64_t hi, uint64_t index) {
  Words<N> w;
#pragma unroll
  for (int g = 0; g < N / 4; ++g) {
    const Philox4 p = philox4x32(key, hi, index / 4 + unsigned(g));
#pragma unroll
    for (int l = 0; l < 4; ++l) w.of[4 * g + l] = p.v[l];
  }
  return w;
}
TESSERA_FN uint64_t long_of(uint32_t low, uint32_t high) { return uint64_t(high) << 32 | low; }

}  // namespace tessera::device
