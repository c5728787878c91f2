// Winograd's minimal filtering for kernels of 3 x 3 (Lavin, Gray 2016), for AVX-512: the transforms
// of tiles, which are those of a line down the columns and then along the rows, and the products
// between them, all in f32. A panel of channels lies in a few vectors side by side, so that every
// step of a transform is one instruction on them. Invariant: an element goes through the same
// operations whatever tile, group or panel it falls into.
#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/kernels/conv_winograd_table.h"
#include "core/backend/cpu/kernels/microgemm.h"

namespace tessera::cpu {
namespace {

#if defined(__AVX512F__)

constexpr int kW = kWidth<float>;
constexpr int64_t kPanel = kWinogradPanel;
static_assert(kPanel == kTileVectors * kW && kWinogradGroup == kTileRows);

TESSERA_FN Floats load(const float* p) { return *reinterpret_cast<const Floats*>(p); }
TESSERA_FN void store(float* p, Floats v) { *reinterpret_cast<Floats*>(p) = v; }
TESSERA_FN Floats load(const uint16_t* p) {
  __m256i bits;
  __builtin_memcpy(&bits, p, sizeof(bits));
  return Floats(Pairs(_mm512_maskz_cvtepu16_epi32(0xffff, bits)) << 16);
}

// N vectors of a line.
template <int N>
struct Line {
  Floats v[N];
};

// The transforms of a line for tiles of n places: B^T d, A g, G w, A^T m and G^T m; for n > 2 those
// of a gradient by the weight.
template <int64_t n>
struct Filter;
template <>
struct Filter<2> {
  TESSERA_FN Line<4> input(const Line<4>& d) {
    return {{d.v[0] - d.v[2], d.v[1] + d.v[2], d.v[2] - d.v[1], d.v[1] - d.v[3]}};
  }
  TESSERA_FN Line<4> cotangent(const Line<2>& g) {
    return {{g.v[0], g.v[0] + g.v[1], g.v[0] - g.v[1], -g.v[1]}};
  }
  TESSERA_FN Line<4> weight(const Line<3>& w) {
    const Floats ends = (w.v[0] + w.v[2]) * spread(0.5f), middle = w.v[1] * spread(0.5f);
    return {{w.v[0], ends + middle, ends - middle, w.v[2]}};
  }
  TESSERA_FN Line<2> output(const Line<4>& m) {
    return {{m.v[0] + m.v[1] + m.v[2], m.v[1] - m.v[2] - m.v[3]}};
  }
  TESSERA_FN Line<3> weight_grad(const Line<4>& m) {
    const Floats half = spread(0.5f), sum = (m.v[1] + m.v[2]) * half;
    return {{m.v[0] + sum, (m.v[1] - m.v[2]) * half, sum + m.v[3]}};
  }
};
template <>
struct Filter<4> {
  TESSERA_FN Line<6> input(const Line<6>& d) {
    const Floats four = spread(4.f), five = spread(5.f);
    const Floats a = d.v[4] - four * d.v[2], b = d.v[3] - four * d.v[1], c = d.v[4] - d.v[2],
                 e = d.v[3] - d.v[1], twice = e + e;
    return {{four * d.v[0] - five * d.v[2] + d.v[4], a + b, a - b, c + twice, c - twice,
             four * d.v[1] - five * d.v[3] + d.v[5]}};
  }
  TESSERA_FN Line<6> cotangent(const Line<4>& g) {
    const Floats even = g.v[0] + g.v[2], odd = g.v[1] + g.v[3],
                 wide_even = g.v[0] + spread(4.f) * g.v[2],
                 wide_odd = spread(2.f) * g.v[1] + spread(8.f) * g.v[3];
    return {{g.v[0], even + odd, even - odd, wide_even + wide_odd, wide_even - wide_odd, g.v[3]}};
  }
  TESSERA_FN Line<3> weight_grad(const Line<6>& m) {
    const Floats sum = (m.v[1] + m.v[2]) * spread(-1 / 6.f), wide_sum = m.v[3] + m.v[4];
    return {{m.v[0] * spread(0.25f) + sum + wide_sum * spread(1 / 24.f),
             (m.v[2] - m.v[1]) * spread(1 / 6.f) + (m.v[3] - m.v[4]) * spread(1 / 12.f),
             sum + wide_sum * spread(1 / 6.f) + m.v[5]}};
  }
};

// By Toom and Cook at points +-p and infinity: with 0 and reciprocals of each other among them sums
// of this length lose ten times as many bits. Values of the points are halved, those of g at +-2
// taken 16 times smaller, so that they stay below those of n = 4.
template <>
struct Filter<7> {
  static constexpr int kPairs = 4;
  static constexpr double kPoint[kPairs] = {0.25, 0.625, 1.125, 2},
                          kOfG[kPairs] = {1, 1, 1, 0.0625};
  // The coefficient of t^(2 n) in the product of t^2 - p^2 over all points but that of `pair`.
  static constexpr double coefficient(int pair, int n) {
    double c[kPairs + 1] = {1};
    for (int i = 0, degree = 0; i < kPairs; ++i) {
      if (i == pair) continue;
      for (int k = ++degree; k >= 0; --k)
        c[k] = (k > 0 ? c[k - 1] : 0) - kPoint[i] * kPoint[i] * c[k];
    }
    return c[n];
  }
  // What a value at point p counts in coefficient n of the sums.
  static constexpr double share(int pair, int n) {
    const double square = kPoint[pair] * kPoint[pair];
    double value = 0, power = 1;
    for (int k = 0; k < kPairs; ++k, power *= square) value += coefficient(pair, k) * power;
    double to = 1 / (value * kPoint[pair] * kOfG[pair]);
    for (int k = 0; k < n; ++k) to *= kPoint[pair];
    return to;
  }

  TESSERA_FN Line<9> input(const Line<9>& d) {
    Line<9> to;
    for_pairs([&]<int i>() __attribute__((always_inline)) {
      constexpr float p = float(kPoint[i]);
      Floats even = d.v[6] * spread(0.5f), odd = d.v[7] * spread(0.5f);
      for (int k = 2; k >= 0; --k) {
        const Floats c = spread(float(coefficient(i, k) / 2));
        even = multiply_add(c, d.v[2 * k], even), odd = multiply_add(c, d.v[2 * k + 1], odd);
      }
      to.v[2 * i] = multiply_add(spread(p), even, odd);
      to.v[2 * i + 1] = multiply_add(spread(-p), even, odd);
    });
    to.v[8] = d.v[8] * spread(0.5f);
    for (int k = 3; k >= 0; --k)
      to.v[8] = multiply_add(spread(float(coefficient(kPairs, k) / 2)), d.v[2 * k], to.v[8]);
    return to;
  }
  TESSERA_FN Line<9> cotangent(const Line<7>& g) {
    Line<9> to;
    for_pairs([&]<int i>() __attribute__((always_inline)) {
      constexpr float scale = float(kOfG[i]), p = float(kPoint[i]), q = p * p;
      Floats even = g.v[0] * spread(scale), odd = g.v[1] * spread(scale * p);
      even = multiply_add(spread(scale * q), g.v[2], even);
      odd = multiply_add(spread(scale * p * q), g.v[3], odd);
      even = multiply_add(spread(scale * q * q), g.v[4], even);
      odd = multiply_add(spread(scale * p * q * q), g.v[5], odd);
      even = multiply_add(spread(scale * q * q * q), g.v[6], even);
      to.v[2 * i] = even + odd, to.v[2 * i + 1] = even - odd;
    });
    to.v[8] = g.v[6];
    return to;
  }
  TESSERA_FN Line<3> weight_grad(const Line<9>& m) {
    Line<3> to{{Floats{}, Floats{}, m.v[8] * spread(2.f)}};
    for_pairs([&]<int i>() __attribute__((always_inline)) {
      const Floats sum = m.v[2 * i] + m.v[2 * i + 1], difference = m.v[2 * i] - m.v[2 * i + 1];
      to.v[0] = multiply_add(spread(float(share(i, 0))), difference, to.v[0]);
      to.v[1] = multiply_add(spread(float(share(i, 1))), sum, to.v[1]);
      to.v[2] = multiply_add(spread(float(share(i, 2))), difference, to.v[2]);
    });
    return to;
  }

 private:
  template <class F>
  TESSERA_FN void for_pairs(F f) {
    f.template operator()<0>(), f.template operator()<1>();
    f.template operator()<2>(), f.template operator()<3>();
  }
};

// A square of From x From vectors becomes one of To x To: `line` of each column, then of each row.
// get(i, j) is a vector of the one, put(i, j, vector) takes one of the other.
template <auto line, int From, int To, class Get, class Put>
TESSERA_FN void square(Get get, Put put) {
  Line<To> columns[From];
  for (int j = 0; j < From; ++j) {
    Line<From> column;
    for (int i = 0; i < From; ++i) column.v[i] = get(i, j);
    columns[j] = line(column);
  }
  for (int i = 0; i < To; ++i) {
    Line<From> row;
    for (int j = 0; j < From; ++j) row.v[j] = columns[j].v[i];
    const Line<To> r = line(row);
    for (int j = 0; j < To; ++j) put(i, j, r.v[j]);
  }
}

// Calls f(first channel) for each vector of the channels.
template <class F>
TESSERA_FN void for_vectors(int64_t channels, F f) {
  for (int64_t c = 0; c < channels; c += kW) f(c);
}

// 16 rows of 16 become columns.
TESSERA_FN void turn(const float* from, int64_t from_row, float* to, int64_t to_row) {
#ifndef __clang__
  transpose_block(from, from_row, to, to_row);
#else
  transpose(from, from_row, kW, kW, to, to_row);
#endif
}

// Edge x Edge pixels of each tile become In x In places.
template <auto line, int Edge, int In, class E>
TESSERA_FN void to_places(const E* const* pixels, int64_t tiles, int64_t channels,
                          WinogradValues to) {
  for (int64_t t = 0; t < tiles; ++t, pixels += Edge * Edge)
    for_vectors(channels, [&](int64_t c) {
      float* at = to.to + t * to.tile + c / kPanel * to.panel + c % kPanel;
      square<line, Edge, In>([&](int i, int j) { return load(pixels[Edge * i + j] + c); },
                             [&](int i, int j, Floats v) {
                               float* place = at + (In * i + j) * to.place;
                               __builtin_prefetch(place + 2 * to.tile, 1, 3);
                               store(place, v);
                             });
    });
}
template <int n, class E>
void input(const E* const* pixels, int64_t tiles, int64_t channels, const WinogradValues& to) {
  to_places<Filter<n>::input, n + 2, n + 2>(pixels, tiles, channels, to);
}
template <int n, class E>
void cotangent(const E* const* pixels, int64_t tiles, int64_t channels, const WinogradValues& to) {
  to_places<Filter<n>::cotangent, n, n + 2>(pixels, tiles, channels, to);
}

void output(const float* m, int64_t place, int64_t tiles, float* const* pixels, int64_t first) {
  constexpr int kOut = kWinogradTile, kIn = kOut + 2;
  for (int64_t t = 0; t < tiles; ++t, m += kPanel, pixels += kOut * kOut)
    for_vectors(kPanel, [&](int64_t c) {
      square<Filter<kOut>::output, kIn, kOut>(
          [&](int i, int j) { return load(m + c + (kIn * i + j) * place); },
          [&](int i, int j, Floats v) { store(pixels[kOut * i + j] + first + c, v); });
    });
}

// Places of 3 x 3 vectors, tap t at `taps` + t * step, or 8 - t where they are turned around.
template <bool kTurned>
TESSERA_FN void store_weight(const float* taps, int64_t step, float* to, int64_t place) {
  constexpr int kIn = kWinogradTile + 2;
  square<Filter<kWinogradTile>::weight, 3, kIn>(
      [&](int i, int j) {
        const int t = 3 * i + j;
        return load(taps + (kTurned ? 8 - t : t) * step);
      },
      [&](int i, int j, Floats v) { store(to + (kIn * i + j) * place, v); });
}

void weight(const float* w, int64_t channels, float* to) {
  constexpr int64_t kEach = kW;  // channels at a time
  alignas(64) float taps[kEach * 9 * kPanel];
  for (int64_t first = 0; first < channels; first += kEach) {
    for (int64_t o = 0; o < kPanel; o += kW)
      for (int64_t i = 0; i < kEach * 9; i += kW)
        turn(w + (o * channels + first) * 9 + i, channels * 9, taps + i * kPanel + o, kPanel);
    for (int64_t c = 0; c < kEach; ++c)
      for_vectors(kPanel, [&](int64_t o) {
        store_weight<false>(taps + c * 9 * kPanel + o, kPanel, to + (first + c) * kPanel + o,
                            channels * kPanel);
      });
  }
}

void turned_weight(const float* w, int64_t outputs, int64_t channels, float* to) {
  // Reads of the last channel go beyond its taps.
  alignas(64) float taps[kW * kPanel], own[kPanel * 9 + kW] = {};
  for (int64_t o = 0; o < outputs; ++o) {
    __builtin_memcpy(own, w + o * channels * 9, kPanel * 9 * sizeof(float));
    for_vectors(kPanel, [&](int64_t c) {
      turn(own + c * 9, 9, taps + c, kPanel);
      store_weight<true>(taps + c, kPanel, to + o * kPanel + c, outputs * kPanel);
    });
  }
}

// The columns of taps [9, 32], one after the other.
TESSERA_FN void store_columns(const Floats (&taps)[9][kTileVectors], float* to) {
  alignas(64) float rows[kW * kW] = {}, columns[kW * kW];
  for (int v = 0; v < kTileVectors; ++v) {
    for (int t = 0; t < 9; ++t) store(rows + t * kW, taps[t][v]);
    turn(rows, kW, columns, kW);
    for (int c = 0; c < kW; ++c, to += 9) __builtin_memcpy(to, columns + c * kW, 9 * sizeof(float));
  }
}
// Where columns of 9 go, in vectors of 32: element i of vector v is of column `from`, and of row t
// where `lanes[v][t]` has a bit.
struct Columns {
  static constexpr int kLanes = 32;
  alignas(64) uint16_t from[9][kLanes] = {};
  uint32_t lanes[9][9] = {};
  constexpr Columns() {
    for (int v = 0; v < 9; ++v)
      for (int i = 0; i < kLanes; ++i) {
        const int at = v * kLanes + i;
        from[v][i] = uint16_t(at / 9), lanes[v][at % 9] |= uint32_t(1) << i;
      }
  }
};
constexpr Columns kColumns;
// The same, rounded.
TESSERA_FN void store_columns(const Floats (&taps)[9][kTileVectors], uint16_t* to) {
  static_assert(kPanel == Columns::kLanes && kTileVectors == 2);
  __m512i rows[9];
  for (int t = 0; t < 9; ++t) {
    const __m256i halves[] = {narrow(taps[t][0]), narrow(taps[t][1])};
    __builtin_memcpy(&rows[t], halves, sizeof(halves));
  }
  for (int v = 0; v < 9; ++v) {
    const __m512i from = _mm512_load_si512(kColumns.from[v]);
    __m512i all = _mm512_setzero_si512();
    for (int t = 0; t < 9; ++t)
      all = _mm512_mask_permutexvar_epi16(all, kColumns.lanes[v][t], from, rows[t]);
    __builtin_memcpy(to + v * Columns::kLanes, &all, sizeof(all));
  }
}

template <int n, class E>
void weight_grad(const float* m, float* sums, bool add, E* dw) {
  Floats taps[9][kTileVectors];
  for (int v = 0; v < kTileVectors; ++v)
    square<Filter<n>::weight_grad, n + 2, 3>(
        [&](int i, int j) { return load(m + ((n + 2) * i + j) * kPanel + v * kW); },
        [&](int i, int j, Floats t) {
          const int64_t at = (3 * i + j) * kPanel + v * kW;
          taps[3 * i + j][v] = add ? load(sums + at) + t : t;
        });
  if (dw) return store_columns(taps, dw);
  for (int t = 0; t < 9; ++t)
    for (int v = 0; v < kTileVectors; ++v) store(sums + t * kPanel + v * kW, taps[t][v]);
}

void product(const WinogradProduct& p) {
  const float* a = p.a;
  float* c = p.c;
  for (int64_t i = 0; i < p.groups; ++i, a += p.a_group, c += kWinogradGroup * p.c_row)
    tile<kTileRows, kTileVectors, false>(a, p.a_row, p.a_k, p.b, kPanel, c, p.c_row, p.k,
                                         NothingAhead());
}

template <int n, class E>
constexpr WinogradGradFns<E> fns() {
  return {n, input<n, E>, cotangent<n, E>, weight_grad<n, E>};
}

#endif

}  // namespace

template <>
const ConvWinogradTable& isa_table<ConvWinogradTable, isa::TESSERA_ISA>() {
#if defined(__AVX512F__)
  static const ConvWinogradTable table{fns<kWinogradTile, float>(),
                                       {fns<4, uint16_t>(), fns<7, uint16_t>()},
                                       output,
                                       weight,
                                       turned_weight,
                                       product};
#else
  static const ConvWinogradTable table{};
#endif
  return table;
}

}  // namespace tessera::cpu
