// Which random words an element takes: what random tensors and dropout share. Printed after
// core/tensor/philox.h in front of those families. Invariant: the words follow from the key and the
// element's global index alone, and are those of the CPU.
namespace tessera::device {

inline constexpr int kRandomThreads = 256;

/// The stream of one key, as on the CPU.
TESSERA_FN uint64_t stream_key(const RandomCall& c) {
  const long seed = c.key ? c.key[0] : c.seed, number = c.key ? c.key[1] : c.number;
  return low64(philox4x32(uint64_t(seed), 0x7465737365726121ull, uint64_t(number)));
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
TESSERA_FN uint64_t long_of(uint32_t low, uint32_t high) { return uint64_t(high) << 32 | low; }

}  // namespace tessera::device
