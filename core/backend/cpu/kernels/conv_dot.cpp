// bf16 convolutions by dot instructions. Results of activations are products whose rows are found
// by pointers: a row of the result sums, tap by tap, a row of channels of the operand, or of zeros
// beyond its border, times that tap of the weight; all of it stays in registers. A weight's
// gradient is a product for each tap, dw[tap] = g' x[shifted by tap], summed over places: both
// operands are packed once for all taps, pairs being two images, so that a shift moves whole units.
// Invariant: an element of dw goes through the same additions whatever tile it falls into.
#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/kernels/conv_dot_table.h"
#include "core/backend/cpu/kernels/microgemm.h"

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

// 16 rows of 16 elements become columns, in pieces: four perfect shuffles of the rows, in each half
// of a register by itself. Then register 2 c + h holds rows 8 h .. 8 h + 7 of columns c and 8 + c.
struct Turned {
  __m256i at[16];
  const char* column(int64_t c) const {
    return reinterpret_cast<const char*>(at + c % 8 * 2) + c / 8 * 16;
  }
};
inline __attribute__((always_inline)) void turn(Turned& rows) {
  Turned other;
  Turned* in_turn[] = {&rows, &other};
  for (int stage = 0; stage < 4; ++stage)
    for (int i = 0; i < 8; ++i) {
      const __m256i a = in_turn[stage % 2]->at[i], b = in_turn[stage % 2]->at[i + 8];
      in_turn[1 - stage % 2]->at[2 * i] = _mm256_unpacklo_epi16(a, b);
      in_turn[1 - stage % 2]->at[2 * i + 1] = _mm256_unpackhi_epi16(a, b);
    }
}

// to[c * taps + t] = from[t * kDotPanel + c] of 16 columns c, up to 16 taps; what lies behind, up
// to 16 elements, is written too.
void join_taps(const uint16_t* from, int64_t taps, uint16_t* to) {
  Turned rows;
  for (int t = 0; t < 16; ++t) {
    rows.at[t] = _mm256_setzero_si256();
    if (t < taps) __builtin_memcpy(&rows.at[t], from + t * kDotPanel, sizeof(__m256i));
  }
  turn(rows);
  for (int c = 0; c < 16; ++c, to += taps) {
    __builtin_memcpy(to, rows.column(c), 16);
    if (taps > kDotHalf) __builtin_memcpy(to + 8, rows.column(c) + sizeof(__m256i), 16);
  }
}

// Where channels of 9 taps, 32 of them in 9 vectors, have tap t: lane from[t][c] of vector v if
// lanes[t][v] has bit c.
struct NineTaps {
  static constexpr int kLanes = 32;
  alignas(64) uint16_t from[9][kLanes] = {};
  uint32_t lanes[9][9] = {};
  constexpr NineTaps() {
    for (int t = 0; t < 9; ++t)
      for (int c = 0; c < kLanes; ++c) {
        const int at = 9 * c + t;
        from[t][c] = uint16_t(at % kLanes), lanes[t][at / kLanes] |= uint32_t(1) << c;
      }
  }
};
constexpr NineTaps kNineTaps;
// The taps of 32 channels.
TESSERA_FN void split_nine(const uint16_t* from, uint16_t* to, int64_t tap_step) {
  constexpr int64_t kAhead = 4096;  // bytes
  __m512i all[9];
  for (int v = 0; v < 9; ++v) {
    const uint16_t* at = from + v * NineTaps::kLanes;
    __builtin_prefetch(reinterpret_cast<const char*>(at) + kAhead, 0, 2);
    __builtin_memcpy(&all[v], at, sizeof(all[v]));
  }
  for (int t = 0; t < 9; ++t) {
    const __m512i lane = _mm512_load_si512(kNineTaps.from[t]);
    __m512i tap = _mm512_setzero_si512();
    for (int v = 0; v < 9; ++v)
      tap = _mm512_mask_permutexvar_epi16(tap, kNineTaps.lanes[t][v], lane, all[v]);
    __builtin_memcpy(to + t * tap_step, &tap, sizeof(tap));
  }
}

void split_taps(const uint16_t* from, int64_t taps, int64_t channels, uint16_t* to,
                int64_t tap_step) {
  int64_t c = 0;
  for (; taps == 9 && c + NineTaps::kLanes <= channels; c += NineTaps::kLanes)
    split_nine(from + c * 9, to + c, tap_step);
  // Reads 16 elements of each row, of which those beyond the taps belong to the next.
  for (; taps <= kDotTaps && c + 32 <= channels; c += 16) {
    Turned rows;
    for (int64_t i = 0; i < 16; ++i)
      __builtin_memcpy(&rows.at[i], from + (c + i) * taps, sizeof(__m256i));
    turn(rows);
    for (int64_t t = 0; t < taps; ++t) {
      __builtin_memcpy(to + t * tap_step + c, rows.column(t), 16);
      __builtin_memcpy(to + t * tap_step + c + 8, rows.column(t) + sizeof(__m256i), 16);
    }
  }
  for (; c < channels; ++c)
    for (int64_t t = 0; t < taps; ++t) to[t * tap_step + c] = from[c * taps + t];
}

void pack_weight(const uint16_t* w, int64_t step, bool across, int64_t pairs, int64_t columns,
                 uint32_t* to) {
  if (!across) {
    transpose(reinterpret_cast<const Bf16Pair*>(w), step / 2, columns, pairs,
              reinterpret_cast<Bf16Pair*>(to), kDotPanel);
    return;
  }
  for (int64_t k = 0; k < pairs; ++k, w += 2 * step, to += kDotPanel)
    for (int64_t j = 0; j < columns; j += kWidth<float>) {
      const Pairs units = interleave(w + j, w + step + j);
      __builtin_memcpy(to + j, &units, sizeof(units));
    }
}

void rows(const DotRows& r) {
  constexpr int kVectors = kDotPanel / kWidth<float>;
  const uint32_t* panel = r.b;
  const char* fetch = r.fetch;
  int64_t lines = r.lines;
  for (int64_t p = 0; p < r.panels; ++p, panel += r.panel_units) {
    Floats acc[kDotTileRows][kVectors] = {};
    const int64_t fetch_step = lines > 0 ? 64 : 0;
    for (int64_t t = 0; t < r.taps; ++t) {
      const Bf16Pair* a[kDotTileRows];
      for (int i = 0; i < kDotTileRows; ++i)
        a[i] = reinterpret_cast<const Bf16Pair*>(r.a[t * kDotTileRows + i]);
      const uint32_t* b = panel + r.tap_at[t];
      int64_t k = 0;
      auto step = [&]() __attribute__((always_inline)) {
        Pairs bv[kVectors];
        for (int v = 0; v < kVectors; ++v) bv[v] = reinterpret_cast<const Pairs*>(b)[v];
        for (int i = 0; i < kDotTileRows; ++i) {
          const Pairs s = spread(a[i][k]);
          for (int v = 0; v < kVectors; ++v) acc[i][v] = multiply_add(s, bv[v], acc[i][v]);
        }
        ++k, b += kDotPanel;
      };
      auto four_steps = [&]() __attribute__((always_inline)) {
        __builtin_prefetch(fetch, 0, 2), fetch += fetch_step;
        step(), step(), step(), step();
      };
      // At the last tap the lines of results are fetched, one for each four pairs.
      if (t + 1 == r.taps)
        for (int i = 0; i < kDotTileRows && k + 4 <= r.pairs; ++i) {
          __builtin_prefetch(r.c[i] + p * kDotPanel, 1, 3);
          four_steps();
        }
      while (k + 4 <= r.pairs) four_steps();
      while (k < r.pairs) step();
    }
    lines -= r.taps * (r.pairs / 4);
    for (int i = 0; i < kDotTileRows; ++i)
      for (int v = 0; v < kVectors; ++v)
        store_narrow(r.c[i] + p * kDotPanel + v * kWidth<float>, acc[i][v]);
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
      for (int64_t c = 0; taps <= kDotTaps && c < kDotPanel; c += 16)
        join_taps(scratch + c, taps, turned + c * taps);
      for (int64_t c = 0; taps > kDotTaps && c < kDotPanel; ++c)
        for (int64_t t = 0; t < taps; ++t) turned[c * taps + t] = scratch[t * kDotPanel + c];
      __builtin_memcpy(to, turned, size_t(kDotPanel * taps) * sizeof(uint16_t));
    }
}

#endif

}  // namespace

template <>
const ConvDotTable& isa_table<ConvDotTable, isa::TESSERA_ISA>() {
#if defined(__AVX512F__)
  static const ConvDotTable table{rows,       pack_weight, split_taps, pack_panels,
                                  pack_sides, tile,        store};
#else
  static const ConvDotTable table{};
#endif
  return table;
}

}  // namespace tessera::cpu
