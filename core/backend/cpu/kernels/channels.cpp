// Rows of channels: moments and gradients of batch-norm, steps of pooling. Channels are walked in
// chunks whose sums stay in registers while the rows go by. Invariant: a channel is summed row by
// row, whatever the width of vectors.
#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/kernels/tables.h"
#include "core/backend/cpu/kernels/vector.h"

namespace tessera::cpu {
namespace {

// K vectors of channels, loaded and stored at any address.
template <class T, int K>
struct Chunk {
  using V = typename Vector<T>::type;
  static constexpr int kChannels = K * kWidth<T>;
  V v[K];
};
// One channel, with the same words.
template <class T>
struct Single {
  using V = T;
  static constexpr int kChannels = 1;
  T v[1];
};

template <class C, class T>
inline __attribute__((always_inline)) C load(const T* p) {
  C c;
  for (int i = 0; i < int(sizeof(c.v) / sizeof(c.v[0])); ++i)
    c.v[i] = reinterpret_cast<const typename C::V*>(p)[i];
  return c;
}
template <class C, class T>
inline __attribute__((always_inline)) void store(T* p, const C& c) {
  for (int i = 0; i < int(sizeof(c.v) / sizeof(c.v[0])); ++i)
    reinterpret_cast<typename C::V*>(p)[i] = c.v[i];
}
template <class C>
inline __attribute__((always_inline)) C zero() {
  C c;
  for (auto& v : c.v) v = typename C::V{};
  return c;
}
template <class C, class F>
inline __attribute__((always_inline)) C map(F f) {
  C c;
  for (int i = 0; i < int(sizeof(c.v) / sizeof(c.v[0])); ++i) c.v[i] = f(i);
  return c;
}

// Calls f(zero chunk, first channel) for all channels, in chunks of four vectors, one, and single
// ones.
template <class T, class F>
inline __attribute__((always_inline)) void for_chunks(int64_t channels, F f) {
  int64_t c = 0;
  for (; c + Chunk<T, 4>::kChannels <= channels; c += Chunk<T, 4>::kChannels)
    f(zero<Chunk<T, 4>>(), c);
  for (; c + Chunk<T, 1>::kChannels <= channels; c += Chunk<T, 1>::kChannels)
    f(zero<Chunk<T, 1>>(), c);
  for (; c < channels; ++c) f(zero<Single<T>>(), c);
}

// Deviations are from a mean that is rounded; their own mean corrects it.
template <class T>
void moments(const T* x, int64_t rows, int64_t channels, T* mean, T* deviations) {
  const T share = T(1) / T(rows);
  for_chunks<T>(channels, [&](auto none, int64_t c) {
    using C = decltype(none);
    C sum = none, squares = none, rest = none;
    for (int64_t r = 0; r < rows; ++r) {
      C a = load<C>(x + r * channels + c);
      sum = map<C>([&](int i) { return sum.v[i] + a.v[i]; });
    }
    C centre = map<C>([&](int i) { return sum.v[i] * share; });
    for (int64_t r = 0; r < rows; ++r) {
      C a = load<C>(x + r * channels + c);
      a = map<C>([&](int i) { return a.v[i] - centre.v[i]; });
      rest = map<C>([&](int i) { return rest.v[i] + a.v[i]; });
      squares = map<C>([&](int i) { return squares.v[i] + a.v[i] * a.v[i]; });
    }
    store(mean + c, map<C>([&](int i) { return centre.v[i] + rest.v[i] * share; }));
    store(deviations + c,
          map<C>([&](int i) { return squares.v[i] - rest.v[i] * rest.v[i] * share; }));
  });
}

template <class T>
void normalize(const T* x, const T* mean, const T* scale, const T* shift, T* y, int64_t rows,
               int64_t channels) {
  for (int64_t r = 0; r < rows; ++r, x += channels, y += channels)
    for (int64_t c = 0; c < channels; ++c) y[c] = (x[c] - mean[c]) * scale[c] + shift[c];
}

template <class T>
void grad_sums(const T* g, const T* x, const T* mean, T* sum, T* product, int64_t rows,
               int64_t channels) {
  for_chunks<T>(channels, [&](auto none, int64_t c) {
    using C = decltype(none);
    C total = none, dot = none;
    const C centre = load<C>(mean + c);
    for (int64_t r = 0; r < rows; ++r) {
      C a = load<C>(g + r * channels + c), b = load<C>(x + r * channels + c);
      total = map<C>([&](int i) { return total.v[i] + a.v[i]; });
      dot = map<C>([&](int i) { return dot.v[i] + a.v[i] * (b.v[i] - centre.v[i]); });
    }
    store(sum + c, total), store(product + c, dot);
  });
}

template <class T>
void grad(const T* g, const T* x, const T* mean, const T* mean_g, const T* slope, const T* scale,
          T* dx, int64_t rows, int64_t channels) {
  for (int64_t r = 0; r < rows; ++r, g += channels, x += channels, dx += channels)
    for (int64_t c = 0; c < channels; ++c)
      dx[c] = (g[c] - mean_g[c] - (x[c] - mean[c]) * slope[c]) * scale[c];
}

template <class T>
void take_larger(const T* x, int32_t place, T* best, int32_t* at, int64_t channels) {
  for (int64_t c = 0; c < channels; ++c) {
    const T v = x[c], b = best[c];
    const bool take = v > b || v != v;
    best[c] = take ? v : b;
    at[c] = take ? place : at[c];
  }
}

template <class T>
void add(const T* x, T* sum, int64_t channels) {
  for (int64_t c = 0; c < channels; ++c) sum[c] += x[c];
}

template <class T>
void add_part(const T* x, T count, T* sum, int64_t channels) {
  for (int64_t c = 0; c < channels; ++c) sum[c] += x[c] / count;
}

template <class T>
constexpr ChannelFns<T> fns() {
  return {moments<T>, normalize<T>, grad_sums<T>, grad<T>, take_larger<T>, add<T>, add_part<T>};
}

}  // namespace

template <>
const ChannelTable& isa_table<ChannelTable, isa::TESSERA_ISA>() {
  static const ChannelTable table{fns<float>(), fns<double>()};
  return table;
}

}  // namespace tessera::cpu
