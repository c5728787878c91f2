// Dropout: element `index` of the whole tensor, or of its sample, is kept or not by a word of the
// key's stream. After draws.h. Invariant: the elements that are dropped are those of the CPU,
// whatever part of the tensor is here, and the same in backward.
namespace tessera::device {

/// y = x scale, or 0 where the element's word is below the threshold.
template <class T>
TESSERA_FN T dropped(T x, uint32_t word, const RandomCall& c) {
  using C = Compute<T>;
  return Narrow<T>::from(word < c.threshold ? C(0) : widen(x) * C(c.scale));
}
struct DropoutPlace {
  uint64_t hi, index;
};
/// The counter of position e of `place`. With `samples`, `place` walks over one sample, and the
/// sample's number is the upper half of the counter; positions go over all samples in turn.
TESSERA_FN DropoutPlace dropout_place(const RandomCall& c, unsigned e) {
  if (!c.samples) return {~uint64_t(0), global_index(c, e)};
  const unsigned sample = e / c.place.count;
  return {uint64_t(c.samples[sample]), global_index(c, e - sample * c.place.count)};
}

template <class T>
TESSERA_FN void dropout(const RandomCall& c) {
  const uint64_t key = block_key(c);
  const unsigned e = blockIdx.x * kRandomThreads + threadIdx.x;
  if (e >= c.total) return;
  const DropoutPlace at = dropout_place(c, e);
  static_cast<T*>(c.out)[e] =
      dropped(static_cast<const T*>(c.in)[e], word_of(key, at.hi, at.index), c);
}

/// The same by packs of 16 bytes, over which `place` walks; the last of a tensor without samples
/// may end behind it.
template <class T>
TESSERA_FN void dropout_packs(const RandomCall& c) {
  if constexpr (sizeof(T) < 8) {
    constexpr unsigned N = kPack<T>;
    const uint64_t key = block_key(c);
    const T* in = static_cast<const T*>(c.in);
    T* out = static_cast<T*>(c.out);
#pragma unroll 1
    for (int step = 0; step < kRandomSteps; ++step) {
      const unsigned e = pack_of(step);
      if (e * N >= c.total) return;
      const DropoutPlace at = dropout_place(c, e);
      const Words<int(N)> w = words_of<int(N)>(key, at.hi, at.index);
      if (e * N + N <= c.total) {
        Pack<T, int(N)> x = load<int(N)>(in + e * N);
#pragma unroll
        for (unsigned l = 0; l < N; ++l) x.of[l] = dropped(x.of[l], w.of[l], c);
        store<T, int(N)>(out + e * N, x);
        continue;
      }
#pragma unroll
      for (unsigned l = 0; l < N; ++l)
        if (e * N + l < c.total) out[e * N + l] = dropped(in[e * N + l], w.of[l], c);
    }
  }
}

}  // namespace tessera::device

// instances: T. Packs are of floats of 2 or 4 bytes.
KERNEL(dropout, RandomCall, 256) { dropout<T>(c); }
KERNEL(packs, RandomCall, 256) { dropout_packs<T>(c); }
