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
TESSERA_FN T uniform_of(uint32_t word) {
  return Narrow<T>::from(fn::from_word(fn::word(uniform_float(word)) & kKept<T>));
}
template <class T>
TESSERA_FN T uniform(uint64_t key, uint64_t index) {
  if constexpr (sizeof(T) == 8) {
    const Philox4 p = philox4x32(key, 1, index / 2);
    const uint64_t bits = index % 2 ? long_of(p.v[2], p.v[3]) : long_of(p.v[0], p.v[1]);
    return double(bits >> 11) * 0x1p-53;
  } else {
    return uniform_of<T>(word_of(key, 0, index));
  }
}

/// A pair of standard normals is r cos(angle), r sin(angle) (Box, Muller 1958). Pair p of f32 takes
/// words 2 p and 2 p + 1.
struct Polar {
  float r, angle;
  TESSERA_FN float first(Polar p) { return p.r * fn::cos(p.angle); }
  TESSERA_FN float second(Polar p) { return p.r * fn::sin(p.angle); }
};
TESSERA_FN Polar polar(uint32_t w0, uint32_t w1) {
  const float u = (float(w0 >> 8) + 1.0f) * 0x1p-24f;
  const float angle = float(w1 >> 8) * (0x1p-24f * 6.283185307f);
  return {fn::sqrt(-2.0f * fn::log(u)), angle};
}
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
    const bool upper = index % 4 >= 2;
    const Polar x = polar(upper ? p.v[2] : p.v[0], upper ? p.v[3] : p.v[1]);
    return Narrow<T>::from(index % 2 ? Polar::second(x) : Polar::first(x));
  }
}

/// The elements of an aligned pack, of which each block of four words gives four.
template <class T>
TESSERA_FN Pack<T, kPack<T>> uniforms(uint64_t key, uint64_t index) {
  const Words<kPack<T>> w = words_of<kPack<T>>(key, 0, index);
  Pack<T, kPack<T>> r;
#pragma unroll
  for (int l = 0; l < kPack<T>; ++l) r.of[l] = uniform_of<T>(w.of[l]);
  return r;
}
template <class T>
TESSERA_FN Pack<T, kPack<T>> normals(uint64_t key, uint64_t index) {
  const Words<kPack<T>> w = words_of<kPack<T>>(key, 3, index);
  Pack<T, kPack<T>> r;
#pragma unroll
  for (int l = 0; l < kPack<T>; l += 2) {
    const Polar x = polar(w.of[l], w.of[l + 1]);
    r.of[l] = Narrow<T>::from(Polar::first(x));
    r.of[l + 1] = Narrow<T>::from(Polar::second(x));
  }
  return r;
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
  const uint64_t key = block_key(c);
  const unsigned e = blockIdx.x * kRandomThreads + threadIdx.x;
  if (e >= c.place.count) return;
  const uint64_t index = global_index(c, e);
  T* out = static_cast<T*>(c.out) + e;
  if constexpr (kKind == 0) *out = uniform<T>(key, index);
  if constexpr (kKind == 1) *out = normal<T>(key, index);
  if constexpr (kKind == 2) *out = integer<T>(key, index, c.low, c.range);
}

/// The same by packs, over which `place` walks; the last may end behind the tensor.
template <class T, int kKind>
TESSERA_FN void random_packs(const RandomCall& c) {
  if constexpr (kKind != 2 && sizeof(T) < 8) {
    constexpr unsigned N = kPack<T>;
    const uint64_t key = block_key(c);
#pragma unroll 1
    for (int step = 0; step < kRandomSteps; ++step) {
      const unsigned e = pack_of(step);
      if (e >= c.place.count) return;
      const uint64_t index = global_index(c, e);
      const Pack<T, int(N)> r = kKind == 0 ? uniforms<T>(key, index) : normals<T>(key, index);
      T* out = static_cast<T*>(c.out);
      if (e * N + N <= c.total) {
        store<T, int(N)>(out + e * N, r);
        continue;
      }
#pragma unroll
      for (unsigned l = 0; l < N; ++l)
        if (e * N + l < c.total) out[e * N + l] = r.of[l];
    }
  }
}

}  // namespace tessera::device

// instances: T, KIND: 0 uniform, 1 normal, 2 integer. Packs are of floats of 2 or 4 bytes.
KERNEL(random, RandomCall, 256) { random<T, KIND>(c); }
KERNEL(packs, RandomCall, 256) { random_packs<T, KIND>(c); }
