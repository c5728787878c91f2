// Dropout: element `index` of the whole tensor, or of its sample, is kept or not by a word of the
// key's stream. After draws.h. Invariant: the elements that are dropped are those of the CPU,
// whatever part of the tensor is here, and the same in backward.
namespace tessera::device {

/// y = x scale, or 0 where the element's word is below the threshold. With `samples`, `each`
/// elements belong to a sample, whose number is the upper half of the counter; `place` then walks
/// over one sample.
template <class T>
TESSERA_FN void dropout(const RandomCall& c) {
  using C = Compute<T>;
  const unsigned e = blockIdx.x * kRandomThreads + threadIdx.x;
  if (e >= c.total) return;
  const uint64_t key = stream_key(c);
  uint64_t hi = ~uint64_t(0), index;
  if (c.samples) {
    const unsigned sample = e / c.place.count;
    hi = uint64_t(c.samples[sample]);
    index = global_index(c, e - sample * c.place.count);
  } else {
    index = global_index(c, e);
  }
  const C x = widen(static_cast<const T*>(c.in)[e]);
  static_cast<T*>(c.out)[e] =
      Narrow<T>::from(word_of(key, hi, index) < c.threshold ? C(0) : x * C(c.scale));
}

}  // namespace tessera::device

// instances: T
KERNEL(dropout, RandomCall, 256) { dropout<T>(c); }
