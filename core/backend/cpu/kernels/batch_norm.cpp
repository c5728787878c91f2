// Batch-norm over rows of channels. Sums walk blocks of a few rows, chunk by chunk of channels: a
// block is read from memory as it lies there, and a chunk's sums are in registers for its rows.
// Invariant: a channel is summed row by row, whatever the width of vectors.
#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/kernels/batch_norm_table.h"
#include "core/backend/cpu/kernels/vector.h"
#include "core/base/boundaries.h"
#include "core/ops/functors/convert.h"

namespace tessera::cpu {
namespace {

constexpr int64_t kBlockRows = limit("batch_norm.block"), kAheadBytes = 8192;

typedef uint32_t WideWords __attribute__((vector_size(kVectorBytes)));
typedef uint32_t Twos __attribute__((vector_size(kVectorBytes), aligned(2), may_alias));
typedef uint16_t NarrowWords __attribute__((vector_size(kVectorBytes / 2), aligned(2), may_alias));

// K vectors of channels, and one channel with the same words.
template <class T, int K>
struct Chunk {
  using V = typename Vector<T>::type;
  static constexpr int kVectors = K, kStep = kWidth<T>, kChannels = K * kWidth<T>;
  V v[K];
};
template <class T>
struct Single {
  using V = T;
  static constexpr int kVectors = 1, kStep = 1, kChannels = 1;
  T v[1];
};

// Brain floats are widened by twos, without a shuffle: in a chunk of several vectors these hold the
// even channels of two vectors' worth, then the odd ones.
template <class C, class E>
constexpr bool kByTwos = sizeof(E) == sizeof(BrainFloat) && C::kVectors > 1;

// Vector number i of a chunk at p, in the type of arithmetic. The chunk is the parameter, for the
// alignment of its vectors is lost where a vector is one.
template <class C, class E>
TESSERA_FN typename C::V get(const E* p, int i) {
  if constexpr (sizeof(E) != sizeof(BrainFloat))
    return reinterpret_cast<const typename C::V*>(p)[i];
  else if constexpr (C::kStep == 1)
    return fn::widen(fn::BF16{p[i].bits});
  else
    return typename C::V(
        __builtin_convertvector(reinterpret_cast<const NarrowWords*>(p)[i], WideWords) << 16);
}
// Bits of brain floats in the upper halves: to nearest even; NaN stays NaN.
TESSERA_FN WideWords rounded(Floats v) {
  const WideWords word = WideWords(v), nearest = word + 0x7fff + (word >> 16 & 1);
  return v == v ? nearest : word | 0x400000;
}
template <class C, class E>
TESSERA_FN void put(E* p, int i, typename C::V v) {
  if constexpr (sizeof(E) != sizeof(BrainFloat)) {
    reinterpret_cast<typename C::V*>(p)[i] = v;
  } else if constexpr (C::kStep == 1) {
    p[i].bits = fn::to_bf16(v).bits;
  } else {
    reinterpret_cast<NarrowWords*>(p)[i] = __builtin_convertvector(rounded(v) >> 16, NarrowWords);
  }
}

template <class C, class F>
TESSERA_FN C map(F f) {
  C c;
  for (int i = 0; i < C::kVectors; ++i) c.v[i] = f(i);
  return c;
}
template <class C, class E>
TESSERA_FN C load(const E* p) {
  if constexpr (kByTwos<C, E>)
    return map<C>([&](int i) {
      const WideWords twos = reinterpret_cast<const Twos*>(p)[i / 2];
      return typename C::V(i % 2 ? twos & 0xffff0000 : twos << 16);
    });
  else
    return map<C>([&](int i) { return get<C>(p, i); });
}
template <class C, class E>
TESSERA_FN void store(E* p, const C& c) {
  if constexpr (kByTwos<C, E>)
    for (int i = 0; i < C::kVectors; i += 2)
      reinterpret_cast<Twos*>(p)[i / 2] =
          rounded(c.v[i]) >> 16 | (rounded(c.v[i + 1]) & 0xffff0000);
  else
    for (int i = 0; i < C::kVectors; ++i) put<C>(p, i, c.v[i]);
}

// What has one value a channel, in the order that chunks of E have.
// Lane i is lane index(i) of a and then b.
template <class F>
TESSERA_FN Floats shuffled(Floats a, Floats b, F index) {
#ifndef __clang__
  typedef int32_t Ints __attribute__((vector_size(kVectorBytes)));
  Ints from;
  for (int i = 0; i < kWidth<float>; ++i) from[i] = index(i);
  return __builtin_shuffle(a, b, from);
#else
  Floats r;
  for (int i = 0; i < kWidth<float>; ++i)
    r[i] = index(i) < kWidth<float> ? a[index(i)] : b[index(i) - kWidth<float>];
  return r;
#endif
}
template <class C, class E, class T>
TESSERA_FN C channels_of(const T* p) {
  C c = load<C>(p);
  if constexpr (kByTwos<C, E>) {
    for (int i = 0; i < C::kVectors; i += 2) {
      const Floats a = c.v[i], b = c.v[i + 1];
      c.v[i] = shuffled(a, b, [](int lane) { return 2 * lane; });
      c.v[i + 1] = shuffled(a, b, [](int lane) { return 2 * lane + 1; });
    }
  }
  return c;
}
template <class C, class E, class T>
TESSERA_FN void set_channels(T* p, C c) {
  if constexpr (kByTwos<C, E>) {
    constexpr int kN = kWidth<T>;
    for (int i = 0; i < C::kVectors; i += 2) {
      const Floats a = c.v[i], b = c.v[i + 1];
      c.v[i] = shuffled(a, b, [](int lane) { return lane / 2 + lane % 2 * kN; });
      c.v[i + 1] = shuffled(a, b, [](int lane) { return (kN + lane) / 2 + lane % 2 * kN; });
    }
  }
  store(p, c);
}
// g where y > 0.
template <class C>
TESSERA_FN C where_positive(const C& y, const C& g) {
  return map<C>([&](int i) { return y.v[i] > 0 ? g.v[i] : typename C::V{}; });
}

// Calls f(an example of a chunk, its first channel) for all channels: chunks of four vectors, one,
// and single ones.
template <class T, class F>
TESSERA_FN void for_chunks(int64_t channels, F f) {
  int64_t c = 0;
  for (; c + Chunk<T, 4>::kChannels <= channels; c += Chunk<T, 4>::kChannels) f(Chunk<T, 4>{}, c);
  for (; c + Chunk<T, 1>::kChannels <= channels; c += Chunk<T, 1>::kChannels) f(Chunk<T, 1>{}, c);
  for (; c < channels; ++c) f(Single<T>{}, c);
}

// Calls f(zero chunk, first channel, first row, rows) for blocks of rows, all channels of each.
template <class T, class F>
TESSERA_FN void for_blocks(int64_t rows, int64_t channels, F f) {
  for (int64_t r = 0; r < rows; r += kBlockRows) {
    const int64_t n = rows - r < kBlockRows ? rows - r : kBlockRows;
    for_chunks<T>(channels, [&](auto none, int64_t c) { f(none, c, r, n); });
  }
}

// How far ahead of an element of a block the same place of a later block lies, in elements.
template <class E>
TESSERA_FN int64_t ahead(int64_t channels) {
  const int64_t block = kBlockRows * channels, least = kAheadBytes / int64_t(sizeof(E));
  return (least + block - 1) / block * block;
}
template <class C, class E>
TESSERA_FN void fetch(const E* p) {
  for (int i = 0; i < C::kChannels * int(sizeof(E)); i += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(p) + i);
}

// Deviations are from the mean of the first rows, so that sums of squares do not cancel: n of them
// against the variance are at most the number of rows over that of the first. Each block is summed
// by itself. Where values have few digits, the low digits of their squared deviations are alike, so
// every addition to one running sum would be rounded in the same direction.
template <class E, class T>
void moments(const E* x, int64_t rows, int64_t channels, T* centre, T* mean, T* deviations) {
  const int64_t first = rows < kBlockRows ? rows : kBlockRows, next = ahead<E>(channels);
  const T share = T(1) / T(rows), first_share = T(1) / T(first);
  for_blocks<T>(rows, channels, [&](auto none, int64_t c, int64_t r0, int64_t n) {
    using C = decltype(none);
    const E* at = x + r0 * channels + c;
    C from, sum = none, squares = none;
    if (r0 == 0) {
      C total = none;
      for (int64_t r = 0; r < n; ++r) {
        const C a = load<C>(at + r * channels);
        total = map<C>([&](int i) { return total.v[i] + a.v[i]; });
      }
      from = map<C>([&](int i) { return total.v[i] * first_share; });
      set_channels<C, E>(centre + c, from);
    } else {
      from = channels_of<C, E>(centre + c);
    }
    for (int64_t r = 0; r < n; ++r) {
      C a = load<C>(at + r * channels);
      fetch<C>(at + r * channels + next);
      a = map<C>([&](int i) { return a.v[i] - from.v[i]; });
      sum = map<C>([&](int i) { return sum.v[i] + a.v[i]; });
      squares = map<C>([&](int i) { return squares.v[i] + a.v[i] * a.v[i]; });
    }
    if (r0) {
      const C sum_before = channels_of<C, E>(mean + c),
              squares_before = channels_of<C, E>(deviations + c);
      sum = map<C>([&](int i) { return sum_before.v[i] + sum.v[i]; });
      squares = map<C>([&](int i) { return squares_before.v[i] + squares.v[i]; });
    }
    if (r0 + n == rows) {
      set_channels<C, E>(mean + c, map<C>([&](int i) { return from.v[i] + sum.v[i] * share; }));
      set_channels<C, E>(deviations + c,
                         map<C>([&](int i) { return squares.v[i] - sum.v[i] * sum.v[i] * share; }));
    } else {
      set_channels<C, E>(mean + c, sum), set_channels<C, E>(deviations + c, squares);
    }
  });
}

template <class E, class T>
void arrange(const T* from, T* to, int64_t channels) {
  for_chunks<T>(channels, [&](auto none, int64_t c) {
    store(to + c, channels_of<decltype(none), E>(from + c));
  });
}

template <class E, class T, bool kResidual, bool kRelu>
TESSERA_FN void normalize_as(const E* x, const E* residual, const T* mean, const T* scale,
                             const T* shift, E* y, int64_t rows, int64_t channels) {
  for (int64_t r = 0; r < rows; ++r, x += channels, y += channels) {
    for_chunks<T>(channels, [&](auto none, int64_t c) {
      using C = decltype(none);
      const C a = load<C>(x + c), m = load<C>(mean + c), s = load<C>(scale + c),
              b = load<C>(shift + c);
      C v = map<C>([&](int i) { return (a.v[i] - m.v[i]) * s.v[i] + b.v[i]; });
      if constexpr (kResidual) {
        const C z = load<C>(residual + c);
        v = map<C>([&](int i) { return v.v[i] + z.v[i]; });
      }
      if constexpr (kRelu) v = map<C>([&](int i) { return v.v[i] < 0 ? typename C::V{} : v.v[i]; });
      store(y + c, v);
    });
    if constexpr (kResidual) residual += channels;
  }
}
template <class E, class T>
void normalize(const E* x, const E* residual, bool relu, const T* mean, const T* scale,
               const T* shift, E* y, int64_t rows, int64_t channels) {
  if (residual)
    relu ? normalize_as<E, T, true, true>(x, residual, mean, scale, shift, y, rows, channels)
         : normalize_as<E, T, true, false>(x, residual, mean, scale, shift, y, rows, channels);
  else
    relu ? normalize_as<E, T, false, true>(x, residual, mean, scale, shift, y, rows, channels)
         : normalize_as<E, T, false, false>(x, residual, mean, scale, shift, y, rows, channels);
}

template <class E, class T, bool kRelu>
TESSERA_FN void grad_sums_as(const E* g, const E* x, const E* y, const T* mean, T* sum, T* product,
                             int64_t rows, int64_t channels) {
  const int64_t next = ahead<E>(channels);
  for_blocks<T>(rows, channels, [&](auto none, int64_t c, int64_t r0, int64_t n) {
    using C = decltype(none);
    C total = none, dot = none;
    const C centre = channels_of<C, E>(mean + c);
    for (int64_t r = r0; r < r0 + n; ++r) {
      const int64_t at = r * channels + c;
      C a = load<C>(g + at), b = load<C>(x + at);
      fetch<C>(g + at + next), fetch<C>(x + at + next);
      if constexpr (kRelu) {
        a = where_positive(load<C>(y + at), a);
        fetch<C>(y + at + next);
      }
      total = map<C>([&](int i) { return total.v[i] + a.v[i]; });
      dot = map<C>([&](int i) { return dot.v[i] + a.v[i] * (b.v[i] - centre.v[i]); });
    }
    if (r0) {
      const C before = channels_of<C, E>(sum + c), dot_before = channels_of<C, E>(product + c);
      total = map<C>([&](int i) { return before.v[i] + total.v[i]; });
      dot = map<C>([&](int i) { return dot_before.v[i] + dot.v[i]; });
    }
    set_channels<C, E>(sum + c, total), set_channels<C, E>(product + c, dot);
  });
}
template <class E, class T>
void grad_sums(const E* g, const E* x, const E* y, const T* mean, T* sum, T* product, int64_t rows,
               int64_t channels) {
  y ? grad_sums_as<E, T, true>(g, x, y, mean, sum, product, rows, channels)
    : grad_sums_as<E, T, false>(g, x, y, mean, sum, product, rows, channels);
}

template <class E, class T, bool kRelu, bool kResidual>
TESSERA_FN void grad_as(const E* g, const E* x, const E* y, const T* mean, const T* mean_g,
                        const T* slope, const T* scale, E* dx, E* dresidual, int64_t rows,
                        int64_t channels) {
  for (int64_t r = 0; r < rows; ++r)
    for_chunks<T>(channels, [&](auto none, int64_t c) {
      using C = decltype(none);
      const int64_t at = r * channels + c;
      C a = load<C>(g + at);
      const C b = load<C>(x + at), m = load<C>(mean + c), mg = load<C>(mean_g + c),
              k = load<C>(slope + c), s = load<C>(scale + c);
      if constexpr (kRelu) a = where_positive(load<C>(y + at), a);
      if constexpr (kResidual) store(dresidual + at, a);
      store(dx + at, map<C>([&](int i) {
              return (a.v[i] - mg.v[i] - (b.v[i] - m.v[i]) * k.v[i]) * s.v[i];
            }));
    });
}
template <class E, class T>
void grad(const E* g, const E* x, const E* y, const T* mean, const T* mean_g, const T* slope,
          const T* scale, E* dx, E* dresidual, int64_t rows, int64_t channels) {
  if (y && dresidual)
    grad_as<E, T, true, true>(g, x, y, mean, mean_g, slope, scale, dx, dresidual, rows, channels);
  else if (y)
    grad_as<E, T, true, false>(g, x, y, mean, mean_g, slope, scale, dx, nullptr, rows, channels);
  else if (dresidual)
    grad_as<E, T, false, true>(g, x, y, mean, mean_g, slope, scale, dx, dresidual, rows, channels);
  else
    grad_as<E, T, false, false>(g, x, y, mean, mean_g, slope, scale, dx, nullptr, rows, channels);
}

template <class E, class T>
constexpr BatchNormFns<E, T> fns() {
  return {moments<E, T>, arrange<E, T>, normalize<E, T>, grad_sums<E, T>, grad<E, T>};
}

}  // namespace

template <>
const BatchNormTable& isa_table<BatchNormTable, isa::TESSERA_ISA>() {
  static const BatchNormTable table{fns<float, float>(), fns<double, double>(),
                                    fns<BrainFloat, float>()};
  return table;
}

}  // namespace tessera::cpu
