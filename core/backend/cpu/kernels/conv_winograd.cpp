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
TESSERA_FN void store(uint16_t* p, Floats v) { store_narrow(p, v); }

// N vectors of a line.
template <int N>
struct Line {
  Floats v[N];
};

// The transforms of a line for tiles of n places: B^T d, A g, G w, A^T m and G^T m; for n = 4 those
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

// Edge x Edge pixels of each tile become places.
template <auto line, int Edge, class E>
TESSERA_FN void to_places(const E* const* pixels, int64_t tiles, int64_t channels,
                          WinogradValues to) {
  constexpr int kIn = kWinogradTile<E> + 2;
  for (int64_t t = 0; t < tiles; ++t, pixels += Edge * Edge)
    for_vectors(channels, [&](int64_t c) {
      float* at = to.to + t * to.tile + c / kPanel * to.panel + c % kPanel;
      square<line, Edge, kIn>(
          [&](int i, int j) { return load(pixels[Edge * i + j] + c); },
          [&](int i, int j, Floats v) { store(at + (kIn * i + j) * to.place, v); });
    });
}
template <class E>
void input(const E* const* pixels, int64_t tiles, int64_t channels, const WinogradValues& to) {
  constexpr int kEdge = kWinogradTile<E> + 2;
  to_places<Filter<kWinogradTile<E>>::input, kEdge>(pixels, tiles, channels, to);
}
template <class E>
void cotangent(const E* const* pixels, int64_t tiles, int64_t channels, const WinogradValues& to) {
  constexpr int kEdge = kWinogradTile<E>;
  to_places<Filter<kEdge>::cotangent, kEdge>(pixels, tiles, channels, to);
}

void output(const float* m, int64_t place, int64_t tiles, float* const* pixels, int64_t first) {
  constexpr int kOut = kWinogradTile<float>, kIn = kOut + 2;
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
  constexpr int kIn = kWinogradTile<float> + 2;
  square<Filter<kWinogradTile<float>>::weight, 3, kIn>(
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
  // Of the last channel more than its taps are read.
  alignas(64) float taps[kW * kPanel], own[kPanel * 9 + kW] = {};
  for (int64_t o = 0; o < outputs; ++o) {
    __builtin_memcpy(own, w + o * channels * 9, kPanel * 9 * sizeof(float));
    for_vectors(kPanel, [&](int64_t c) {
      turn(own + c * 9, 9, taps + c, kPanel);
      store_weight<true>(taps + c, kPanel, to + o * kPanel + c, outputs * kPanel);
    });
  }
}

template <class E>
void weight_grad(const float* m, int64_t place, E* dw) {
  constexpr int kIn = kWinogradTile<E> + 2;
  alignas(64) float taps[kW * kPanel] = {}, rows[kPanel * kW];
  alignas(64) E narrow_rows[kPanel * kW];
  for_vectors(kPanel, [&](int64_t c) {
    square<Filter<kWinogradTile<E>>::weight_grad, kIn, 3>(
        [&](int i, int j) { return load(m + c + (kIn * i + j) * place); },
        [&](int i, int j, Floats v) { store(taps + (3 * i + j) * kPanel + c, v); });
    turn(taps + c, kPanel, rows + c * kW, kW);
  });
  for (int64_t c = 0; c < kPanel; ++c) {
    store(narrow_rows + c * kW, load(rows + c * kW));
    __builtin_memcpy(dw + c * 9, narrow_rows + c * kW, 9 * sizeof(E));
  }
}

void product(const WinogradProduct& p) {
  const float* a = p.a;
  float* c = p.c;
  for (int64_t i = 0; i < p.groups; ++i, a += p.a_group, c += kWinogradGroup * kPanel) {
    alignas(64) float sums[kWinogradGroup * kPanel];
    tile<kTileRows, kTileVectors, false>(a, p.a_row, p.a_k, p.b, kPanel, p.add ? sums : c, kPanel,
                                         p.k, NothingAhead());
    if (p.add)
      for (int64_t j = 0; j < kWinogradGroup * kPanel; j += kW)
        store(c + j, load(c + j) + load(sums + j));
  }
}

template <class E>
constexpr WinogradGradFns<E> fns() {
  return {input<E>, cotangent<E>, weight_grad<E>};
}

#endif

}  // namespace

template <>
const ConvWinogradTable& isa_table<ConvWinogradTable, isa::TESSERA_ISA>() {
#if defined(__AVX512F__)
  static const ConvWinogradTable table{fns<float>(), fns<uint16_t>(), output,
                                       weight,       turned_weight,   product};
#else
  static const ConvWinogradTable table{};
#endif
  return table;
}

}  // namespace tessera::cpu
