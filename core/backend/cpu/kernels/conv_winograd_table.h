// The functions of Winograd convolutions, which kernels/conv_winograd.cpp fills for AVX-512. Plain
// pointers and integers only.
#pragma once
#include <cstdint>

#include "core/base/boundaries.h"

namespace tessera::cpu {

// Channels go in panels, rows of a product in groups.
inline constexpr int64_t kWinogradPanel = limit("winograd.channels"),
                         kWinogradGroup = limit("winograd.group");
/// A tile is n x n places of the output, which see (n + 2) x (n + 2) pixels of the input: as many
/// places of the transformed domain. Larger tiles take fewer multiplications and lose some bits:
/// f32 has 2 x 2, whose errors are those of plain sums. bf16 (its bits are E) has 4 x 4 and 7 x 7,
/// and only for the gradient by the weight, whose elements are sums over all tiles: of f32
/// arithmetic on them rounding leaves no trace but where they nearly cancel. An output of such a
/// tile would keep one: pixels that it does not see cancel only to the accuracy of the largest.
inline constexpr int64_t kWinogradTile = 2;  // of f32

/// Where transformed values go: channel c of tile t at place k lies k * place + t * tile + c / 32 *
/// panel + c % 32 from `to`.
struct WinogradValues {
  float* to;
  int64_t place, tile, panel;
};

/// Products c[row, j] = sum over k of a[row, k] b[k, j] of `groups` groups of rows: b has rows of
/// kWinogradPanel, c too, which begin `c_row` apart; a[row, k] of group i is at i * a_group + row *
/// a_row + k * a_k.
struct WinogradProduct {
  const float* a;
  int64_t a_group, a_row, a_k;
  const float* b;
  float* c;
  int64_t c_row, groups, k;
};

/// Transforms by the matrices B, G and A of Lavin and Gray for tiles of n x n. Counts of channels
/// are multiples of kWinogradPanel. Here those that the gradient by the weight takes, of operands
/// and results of E.
template <class E>
struct WinogradGradFns {
  int64_t tile;  // n
  /// B^T d B of the tiles whose (n + 2)^2 pixels, row by row, `pixels` points at.
  void (*input)(const E* const* pixels, int64_t tiles, int64_t channels, const WinogradValues& to);
  /// A g A^T of the tiles whose n^2 pixels `pixels` points at.
  void (*cotangent)(const E* const* pixels, int64_t tiles, int64_t channels,
                    const WinogradValues& to);
  /// G^T m G of one output and a panel of channels, m[k, 32]; where `add` plus `sums` [3, 3, 32].
  /// Goes to dw [32, 3, 3], or where that is null to `sums`.
  void (*weight_grad)(const float* m, float* sums, bool add, E* dw);
};
struct ConvWinogradTable {
  WinogradGradFns<float> f32;
  WinogradGradFns<uint16_t> bf16[2];
  /// A^T m A of the panel of channels from `first` on into n^2 pixels of each tile; m[k, tile, 32]
  /// with `place` from one k to the next.
  void (*output)(const float* m, int64_t place, int64_t tiles, float* const* pixels, int64_t first);
  /// G w G^T of weights [outputs, channels, 3, 3] for a panel of outputs: to[k, channel, 32].
  void (*weight)(const float* w, int64_t channels, float* to);
  /// The same for a panel of channels, taps being turned around: to[k, output, 32].
  void (*turned_weight)(const float* w, int64_t outputs, int64_t channels, float* to);
  void (*product)(const WinogradProduct& p);
};

}  // namespace tessera::cpu
