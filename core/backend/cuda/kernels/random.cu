// Random tensors: element `index` of the whole tensor draws from the stream of its key at that
// place, whatever part of the tensor is here. After math_trig.h and
// draws.h. Invariant: f32, 16-bit floats and integers have the bits of the CPU; normals of f64 call
// libm.
namespace tessera::device {

/// The bits of an f32 that T keeps.
template <class T>
inline constexpr unsigned kKept = ~0u;
template <>
inline constexpr unsigned kKept<BF16> = 0xffff0000u;
template <>
inline constexpr unsigned kKept<F16> = 0xffffe000u;

/// Uniform in [0, 1). 16-bit results keep the upper bits, since rounding would give 1.
template <class T>
TESSERA_FN T uniform(uint64_t key, uint64_t index) {
  if constexpr (sizeof(T) == 8) {
    const Philox4 p = philox4x32(key, 1, index / 2);
    const uint64_t bits = index % 2 ? long_of(p.v[2], p.v[3]) : long_of(p.v[0], p.v[1]);
    return double(bits >> 11) * 0x1p-53;
  } else {
    const float x = uniform_float(word_of(key, 0, index));
    return Narrow<T>::from(fn::from_word(fn::word(x) & kKept<T>));
  }
}

/// Standard normal, by pairs (Box, Muller 1958). Pair p of f32 takes words 2 p and 2 p + 1.
template <class T>
TESSERA_FN T normal(uint64_t key, uint64_t index) {
  if constexpr (sizeof(T) == 8) {
    const Philox4 p = philox4x32(key, 2, index / 2);
    const double u = (double(long_of(p.v[0], p.v[1]) >> 11) + 1) * 0x1p-53;
    const double angle =
        double(long_of(p.v[2], p.v[3]) >> 11) * (0x1p-53 * 2 * 3.14159265358979323846);
    const double r = fn::sqrt(-2 * ::log(u));
    return r * (index % 2 ? ::sin(angle) : ::cos(angle));
  } else {
    const Philox4 p = philox4x32(key, 3, index / 4);
    const bool second = index % 4 >= 2;
    const uint32_t w0 = second ? p.v[2] : p.v[0], w1 = second ? p.v[3] : p.v[1];
    const float u = (float(w0 >> 8) + 1.0f) * 0x1p-24f;
    const float angle = float(w1 >> 8) * (0x1p-24f * 6.283185307f);
    const float r = fn::sqrt(-2.0f * fn::log(u));
    return Narrow<T>::from(r * (index % 2 ? fn::sin(angle) : fn::cos(angle)));
  }
}

/// An integer in [low, low + range): the high half of a 64-bit draw times the range (Lemire 2019,
/// without rejection).
template <class T>
TESSERA_FN T integer(uint64_t key, uint64_t index, long low, uint64_t range) {
  const uint64_t x = low64(philox4x32(key, 4, index));
  const uint64_t xl = uint32_t(x), xh = x >> 32, rl = uint32_t(range), rh = range >> 32;
  const uint64_t middle = xh * rl + (xl * rl >> 32), cross = xl * rh + uint32_t(middle);
  return Narrow<T>::from(low + long(xh * rh + (middle >> 32) + (cross >> 32)));
}

template <class T, int kKind>
TESSERA_FN void random(const RandomCall& c) {
  const unsigned e = blockIdx.x * kRandomThreads + threadIdx.x;
  if (e >= c.place.count) return;
  const uint64_t key = stream_key(c), index = global_index(c, e);
  T* out = static_cast<T*>(c.out) + e;
  if constexpr (kKind == 0) *out = uniform<T>(key, index);
  if constexpr (kKind == 1) *out = normal<T>(key, index);
  if constexpr (kKind == 2) *out = integer<T>(key, index, c.low, c.range);
}

}  // namespace tessera::device

// instances: T, KIND: 0 uniform, 1 normal, 2 integer
KERNEL(random, RandomCall, 256) { random<T, KIND>(c); }
