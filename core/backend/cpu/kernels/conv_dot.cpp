// bf16 convolutions by dot instructions. A weight's gradient is a product for each tap, dw[tap] =
// g' x[shifted by tap], summed over places: both operands are packed once for all taps, pairs being
// two images, so that a shift moves whole units. Invariant: an element of dw goes through the same
// additions whatever tile it falls into.
#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/kernels/conv_dot_table.h"
#include "core/backend/cpu/kernels/vector.h"

namespace tessera::cpu {
namespace {

#if defined(__AVX512F__)

void pack_panels(const DotPixels& from, uint32_t* to, int64_t stride) {
  for (int64_t i = 0; i < from.count; ++i, to += kDotPanel) {
    uint32_t* at = to;
    for (int64_t c = 0; c < from.channels; c += kDotPanel, at += stride) {
      __m512i pairs[2] = {};
      if (from.first) {
        const __m512i a = _mm512_loadu_si512(from.first + i * from.step + c),
                      b = _mm512_loadu_si512(from.second + i * from.step + c);
        pairs[0] = _mm512_unpacklo_epi16(a, b), pairs[1] = _mm512_unpackhi_epi16(a, b);
      }
      __builtin_memcpy(at, pairs, sizeof(pairs));
    }
  }
}

void pack_sides(const DotPixels& from, uint32_t* to, int64_t stride) {
  for (int64_t i = 0; i < from.count; ++i, to += kDotSide) {
    uint32_t* at = to;
    for (int64_t c = 0; c < from.channels; c += kDotSide, at += stride) {
      __m256i a, b;
      __builtin_memcpy(&a, from.first + i * from.step + c, sizeof(a));
      __builtin_memcpy(&b, from.second + i * from.step + c, sizeof(b));
      const __m256i pairs[] = {_mm256_unpacklo_epi16(a, b), _mm256_unpackhi_epi16(a, b)};
      __builtin_memcpy(at, pairs, sizeof(pairs));
    }
  }
}

void tile(const DotWalk& w, const uint32_t* g, const uint32_t* x, float* sums, bool add,
          const char* fetch, int64_t fetch_step) {
  constexpr int kVectors = kDotPanel / kWidth<float>;
  Floats acc[kDotTileRows][kVectors];
  for (int r = 0; r < kDotTileRows; ++r)
    for (int v = 0; v < kVectors; ++v)
      acc[r][v] = add ? reinterpret_cast<const Floats*>(sums)[r * kVectors + v] : Floats{};
  const auto* a = reinterpret_cast<const Bf16Pair*>(g);
  for (int64_t p = 0; p < w.pairs; ++p)
    for (int64_t q = 0; q < w.rows; ++q) {
      const uint32_t* b = x + p * w.x_pair + q * w.x_row;
      auto step = [&]() __attribute__((always_inline)) {
        Pairs bv[kVectors];
        for (int v = 0; v < kVectors; ++v) bv[v] = reinterpret_cast<const Pairs*>(b)[v];
        for (int r = 0; r < kDotTileRows; ++r) {
          const Pairs s = spread(a[r]);
          for (int v = 0; v < kVectors; ++v) acc[r][v] = multiply_add(s, bv[v], acc[r][v]);
        }
        a += kDotSide, b += w.x_step;
      };
      int64_t i = 0;
      for (; i + 4 <= w.width; i += 4) {
        __builtin_prefetch(fetch, 0, 2), __builtin_prefetch(fetch + 64, 0, 2);
        fetch += fetch_step;
        step(), step(), step(), step();
      }
      for (; i < w.width; ++i) step();
    }
  for (int r = 0; r < kDotTileRows; ++r)
    for (int v = 0; v < kVectors; ++v)
      reinterpret_cast<Floats*>(sums)[r * kVectors + v] = acc[r][v];
}

// to[c * taps + t] = from[t * kDotPanel + c] of 16 columns c, up to 16 taps; what lies behind, up
// to 16 elements, is written too.
void transpose_16(const uint16_t* from, int64_t taps, uint16_t* to) {
  __m256i rows[2][16];
  for (int t = 0; t < 16; ++t) {
    rows[0][t] = _mm256_setzero_si256();
    if (t < taps) __builtin_memcpy(&rows[0][t], from + t * kDotPanel, sizeof(__m256i));
  }
  // Four perfect shuffles of the rows, in each half of a register by itself: then register 2 c + h
  // holds taps 8 h .. 8 h + 7 of columns c and 8 + c.
  for (int stage = 0; stage < 4; ++stage)
    for (int i = 0; i < 8; ++i) {
      const __m256i a = rows[stage % 2][i], b = rows[stage % 2][i + 8];
      rows[1 - stage % 2][2 * i] = _mm256_unpacklo_epi16(a, b);
      rows[1 - stage % 2][2 * i + 1] = _mm256_unpackhi_epi16(a, b);
    }
  for (int c = 0; c < 16; ++c, to += taps) {
    const char* at = reinterpret_cast<const char*>(&rows[0][c % 8 * 2]) + c / 8 * 16;
    __builtin_memcpy(to, at, 16);
    if (taps > 8) __builtin_memcpy(to + 8, at + sizeof(__m256i), 16);
  }
}

void store(const float* tiles, int64_t panels, int64_t taps, uint16_t* dw, int64_t dw_row,
           uint16_t* scratch) {
  // Where the floats of a panel are, in the order of channels: unpacking takes fours of a lane.
  alignas(64) int32_t places[kDotPanel];
  for (int32_t j = 0; j < kDotPanel; ++j)
    places[j] = j / 4 % 2 * int32_t(kDotPanel / 2) + j / 8 * 4 + j % 4;
  const __m512i low = _mm512_load_si512(places), high = _mm512_load_si512(places + 16);
  uint16_t* const turned = scratch + taps * kDotPanel;
  for (int64_t r = 0; r < kDotTileRows; ++r)
    for (int64_t p = 0; p < panels; ++p) {
      const float* at = tiles + p * taps * kDotTile + r * kDotPanel;
      uint16_t *to = dw + dot_row(r) * dw_row + p * kDotPanel * taps,
               *narrow = taps == 1 ? to : scratch;
      for (int64_t t = 0; t < taps; ++t, at += kDotTile, narrow += kDotPanel) {
        const __m512 a = _mm512_loadu_ps(at), b = _mm512_loadu_ps(at + kDotPanel / 2);
        store_narrow(narrow, Floats(_mm512_permutex2var_ps(a, low, b)));
        store_narrow(narrow + kDotPanel / 2, Floats(_mm512_permutex2var_ps(a, high, b)));
      }
      if (taps == 1) continue;
      for (int64_t c = 0; taps <= 16 && c < kDotPanel; c += 16)
        transpose_16(scratch + c, taps, turned + c * taps);
      for (int64_t c = 0; taps > 16 && c < kDotPanel; ++c)
        for (int64_t t = 0; t < taps; ++t) turned[c * taps + t] = scratch[t * kDotPanel + c];
      __builtin_memcpy(to, turned, size_t(kDotPanel * taps) * sizeof(uint16_t));
    }
}

#endif

}  // namespace

template <>
const ConvDotTable& isa_table<ConvDotTable, isa::TESSERA_ISA>() {
#if defined(__AVX512F__)
  static const ConvDotTable table{pack_panels, pack_sides, tile, store};
#else
  static const ConvDotTable table{};
#endif
  return table;
}

}  // namespace tessera::cpu
