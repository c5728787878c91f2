// F(2 x 2, 3 x 3) of Winograd's minimal filtering (Lavin, Gray 2016) in f32 for AVX-512: the
// transforms, which only add, subtract and halve, and the products between them. A panel of
// channels lies in a few vectors side by side, so that every step of a transform is one instruction
// on them. Invariant: an element goes through the same operations whatever tile, group or panel it
// falls into.
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

// Vectors of a line of four places, transformed.
struct Four {
  Floats v[4];
};
// B^T d
TESSERA_FN Four of_input(Floats a, Floats b, Floats c, Floats d) {
  return {{a - c, b + c, c - b, b - d}};
}
// A g
TESSERA_FN Four of_cotangent(Floats a, Floats b) { return {{a, a + b, a - b, -b}}; }
// G w
TESSERA_FN Four of_weight(Floats a, Floats b, Floats c) {
  const Floats half = spread(0.5f), ends = (a + c) * half, middle = b * half;
  return {{a, ends + middle, ends - middle, c}};
}

// 16 rows of 16 become columns.
TESSERA_FN void turn(const float* from, int64_t from_row, float* to, int64_t to_row) {
#ifndef __clang__
  transpose_block(from, from_row, to, to_row);
#else
  transpose(from, from_row, kW, kW, to, to_row);
#endif
}

// Calls f(first channel) for each vector of the channels.
template <class F>
TESSERA_FN void for_vectors(int64_t channels, F f) {
  for (int64_t c = 0; c < channels; c += kW) f(c);
}

// Stores the rows of a tile, each transformed, as 16 places.
template <class F>
TESSERA_FN void store_places(float* to, int64_t place, F row) {
  for (int i = 0; i < 4; ++i) {
    const Four r = row(i);
    for (int j = 0; j < 4; ++j) store(to + (4 * i + j) * place, r.v[j]);
  }
}

TESSERA_FN float* at_channel(const WinogradValues& to, int64_t tile, int64_t c) {
  return to.to + tile * to.tile + c / kPanel * to.panel + c % kPanel;
}

void input(const float* const* pixels, int64_t tiles, int64_t channels, const WinogradValues& to) {
  for (int64_t t = 0; t < tiles; ++t, pixels += 16)
    for_vectors(channels, [&](int64_t c) {
      Four column[4];
      for (int j = 0; j < 4; ++j)
        column[j] = of_input(load(pixels[j] + c), load(pixels[4 + j] + c), load(pixels[8 + j] + c),
                             load(pixels[12 + j] + c));
      store_places(at_channel(to, t, c), to.place, [&](int i) {
        return of_input(column[0].v[i], column[1].v[i], column[2].v[i], column[3].v[i]);
      });
    });
}

void cotangent(const float* const* pixels, int64_t tiles, int64_t channels,
               const WinogradValues& to) {
  for (int64_t t = 0; t < tiles; ++t, pixels += 4)
    for_vectors(channels, [&](int64_t c) {
      const Four left = of_cotangent(load(pixels[0] + c), load(pixels[2] + c)),
                 right = of_cotangent(load(pixels[1] + c), load(pixels[3] + c));
      store_places(at_channel(to, t, c), to.place,
                   [&](int i) { return of_cotangent(left.v[i], right.v[i]); });
    });
}

void output(const float* m, int64_t place, int64_t tiles, float* const* pixels) {
  for (int64_t t = 0; t < tiles; ++t, m += kPanel, pixels += 4)
    for_vectors(kPanel, [&](int64_t c) {
      Floats upper[4], lower[4];
      for (int j = 0; j < 4; ++j) {
        const float* from = m + c + j * place;
        const Floats a = load(from), b = load(from + 4 * place), d = load(from + 8 * place),
                     e = load(from + 12 * place);
        upper[j] = a + b + d, lower[j] = b - d - e;
      }
      auto ends = [&](const Floats* r, float* const* to) {
        store(to[0] + c, r[0] + r[1] + r[2]);
        store(to[1] + c, r[1] - r[2] - r[3]);
      };
      ends(upper, pixels), ends(lower, pixels + 2);
    });
}

// Places of 3 x 3 vectors, tap t at `taps` + t * step, or 8 - t where they are turned around.
template <bool kTurned>
TESSERA_FN void store_weight(const float* taps, int64_t step, float* to, int64_t place) {
  auto tap = [&](int t) { return load(taps + (kTurned ? 8 - t : t) * step); };
  Four column[3];
  for (int j = 0; j < 3; ++j) column[j] = of_weight(tap(j), tap(3 + j), tap(6 + j));
  store_places(to, place,
               [&](int i) { return of_weight(column[0].v[i], column[1].v[i], column[2].v[i]); });
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
  alignas(64) float taps[kW * kPanel], end[kPanel * 9 + kW];
  for (int64_t o = 0; o < outputs; ++o) {
    const float* from = w + o * channels * 9;
    if (o + 1 == outputs) {  // 16 taps of each channel are read, of the last one too
      __builtin_memcpy(end, from, kPanel * 9 * sizeof(float));
      __builtin_memset(end + kPanel * 9, 0, kW * sizeof(float));
      from = end;
    }
    for_vectors(kPanel, [&](int64_t c) {
      turn(from + c * 9, 9, taps + c, kPanel);
      store_weight<true>(taps + c, kPanel, to + o * kPanel + c, outputs * kPanel);
    });
  }
}

void weight_grad(const float* m, int64_t place, float* dw) {
  alignas(64) float taps[kW * kPanel], rows[kPanel * kW];
  for_vectors(kPanel, [&](int64_t c) {
    // G^T m, whose lines are of three.
    auto line = [](Floats a, Floats b, Floats d, Floats e, Floats* to) {
      const Floats half = spread(0.5f);
      to[0] = a + (b + d) * half, to[1] = (b - d) * half, to[2] = (b + d) * half + e;
    };
    Floats column[4][3];
    for (int j = 0; j < 4; ++j) {
      const float* from = m + c + j * place;
      line(load(from), load(from + 4 * place), load(from + 8 * place), load(from + 12 * place),
           column[j]);
    }
    for (int i = 0; i < 3; ++i) {
      Floats row[3];
      line(column[0][i], column[1][i], column[2][i], column[3][i], row);
      for (int j = 0; j < 3; ++j) store(taps + (3 * i + j) * kPanel + c, row[j]);
    }
    for (int t = 9; t < kW; ++t) store(taps + t * kPanel + c, Floats{});
    turn(taps + c, kPanel, rows + c * kW, kW);
  });
  for (int64_t c = 0; c < kPanel; ++c)
    __builtin_memcpy(dw + c * 9, rows + c * kW, 9 * sizeof(float));
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

#endif

}  // namespace

template <>
const ConvWinogradTable& isa_table<ConvWinogradTable, isa::TESSERA_ISA>() {
#if defined(__AVX512F__)
  static const ConvWinogradTable table{input,         cotangent, output,     weight,
                                       turned_weight, product,   weight_grad};
#else
  static const ConvWinogradTable table{};
#endif
  return table;
}

}  // namespace tessera::cpu
