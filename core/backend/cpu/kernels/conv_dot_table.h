// The functions of bf16 convolutions by dot instructions, which kernels/conv_dot.cpp fills. Plain
// pointers and integers only.
#pragma once
#include <cstdint>

#include "core/base/boundaries.h"

namespace tessera::cpu {

// A weight's gradient is summed over places of the output by twos: a place of one image and the
// same of the next, interleaved channel by channel. Panels hold kDotPanel channels of x side by
// side, sides kDotSide channels of g, both in the order that interleaving leaves them in.
inline constexpr int64_t kDotPanel = limit("conv_dot.channels"),
                         kDotSide = limit("conv_dot_weight.outputs"),
                         kDotTileRows = limit("conv_dot_rows.tile");
/// Taps that are turned in registers, at most, and those of which one half is.
inline constexpr int64_t kDotTaps = limit("conv_dot.taps"),
                         kDotHalf = limit("conv_dot_weight.half");
inline constexpr int64_t kDotTile = kDotTileRows * kDotPanel;  // floats of a tile of sums
inline constexpr int64_t dot_scratch(int64_t taps) { return 2 * kDotPanel * taps + 64; }
/// Row r of a half of a side is output dot_row(r) after the side's 4 * half-th.
inline constexpr int64_t dot_row(int64_t r) { return r / 4 * 8 + r % 4; }

/// `count` pixels of `channels` channels in two images, `step` elements apart; null: of zeros.
struct DotPixels {
  const uint16_t *first, *second;
  int64_t count, step, channels;
};
/// What a tile of sums walks over: `pairs` of images, `rows` of each, `width` places of a row. In
/// x, units from one to the next; units of g follow each other by kDotSide.
struct DotWalk {
  int64_t pairs, x_pair, rows, x_row, width, x_step;
};
/// A group of kDotTileRows rows of a product whose rows are found by pointers: c[r] = sum over taps
/// of a[tap][r] b[tap], c having `panels` of kDotPanel elements. b holds for each panel, and for
/// each tap at `tap_at` from there, `pairs` times kDotPanel units: two rows of it interleaved.
struct DotRows {
  int64_t taps, pairs, panels, panel_units;
  const int64_t* tap_at;
  const uint16_t* const* a;  // [taps][kDotTileRows]
  const uint32_t* b;
  uint16_t* const* c;
  const char* fetch;  // cache lines to fetch: with every fourth pair one
  int64_t lines;
};

struct ConvDotTable {
  void (*rows)(const DotRows& r);
  /// One tap of a panel of b, its `columns` being kDotPanel, from rows of a weight that lie `step`
  /// apart: unit (k, j) is elements 2 k and 2 k + 1 of row j, or where `across`, element j of rows
  /// 2 k and 2 k + 1.
  void (*pack_weight)(const uint16_t* w, int64_t step, bool across, int64_t pairs, int64_t columns,
                      uint32_t* to);
  /// to[t * tap_step + c] = from[c * taps + t] for t < taps and c < channels.
  void (*split_taps)(const uint16_t* from, int64_t taps, int64_t channels, uint16_t* to,
                     int64_t tap_step);
  /// Interleaves two images' pixels: unit j of pixel i in panel or side p goes to
  /// to[p * stride + i * width + j], where width is kDotPanel or kDotSide and divides the channels.
  void (*pack_panels)(const DotPixels& from, uint32_t* to, int64_t stride);
  void (*pack_sides)(const DotPixels& from, uint32_t* to, int64_t stride);
  /// sums [kDotTileRows, kDotPanel] (+)= g' x over the walk. With every fourth place of a row two
  /// cache lines are fetched, from `fetch` on by `fetch_step` bytes.
  void (*tile)(const DotWalk& walk, const uint32_t* g, const uint32_t* x, float* sums, bool add,
               const char* fetch, int64_t fetch_step);
  /// Rounds tiles [panels, taps] into rows of dw, row r to dw + dot_row(r) * dw_row, as [panels *
  /// kDotPanel, taps]. `scratch` holds dot_scratch(taps) elements.
  void (*store)(const float* tiles, int64_t panels, int64_t taps, uint16_t* dw, int64_t dw_row,
                uint16_t* scratch);
};

}  // namespace tessera::cpu
