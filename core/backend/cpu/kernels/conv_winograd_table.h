// The functions of Winograd convolutions, which kernels/conv_winograd.cpp fills for AVX-512. Plain
// pointers and integers only.
#pragma once
#include <cstdint>

namespace tessera::cpu {

// A tile is 2 x 2 places of the output, which see 4 x 4 pixels of the input: 16 places of the
// transformed domain. Channels go in panels, rows of a product in groups.
inline constexpr int64_t kWinogradPlaces = 16, kWinogradPanel = 32, kWinogradGroup = 8;

/// Where transformed values go: channel c of tile t at place k lies k * place + t * tile + c / 32 *
/// panel + c % 32 from `to`.
struct WinogradValues {
  float* to;
  int64_t place, tile, panel;
};

/// Products c[row, j] = sum over k of a[row, k] b[k, j], where `add` added to what c holds, of
/// `groups` groups of rows: c has rows of kWinogradPanel, b too; a[row, k] of group i is at i *
/// a_group + row * a_row + k * a_k.
struct WinogradProduct {
  const float* a;
  int64_t a_group, a_row, a_k;
  const float* b;
  float* c;
  int64_t groups, k;
  bool add;
};

/// Everything below with B^T = [1 0 -1 0; 0 1 1 0; 0 -1 1 0; 0 1 0 -1], G = [1 0 0; 1 1 1; 1 -1 1;
/// 0 0 2] / [1; 2; 2; 2] and A^T = [1 1 1 0; 0 1 -1 -1]. Counts of channels are multiples of
/// kWinogradPanel.
struct ConvWinogradTable {
  /// B^T d B of the tiles whose 16 pixels, row by row, `pixels` points at.
  void (*input)(const float* const* pixels, int64_t tiles, int64_t channels,
                const WinogradValues& to);
  /// A g A^T of the tiles whose 4 pixels `pixels` points at.
  void (*cotangent)(const float* const* pixels, int64_t tiles, int64_t channels,
                    const WinogradValues& to);
  /// A^T m A of a panel into 4 pixels of each tile; m[k, tile, 32] with `place` from one k to the
  /// next.
  void (*output)(const float* m, int64_t place, int64_t tiles, float* const* pixels);
  /// G w G^T of weights [outputs, channels, 3, 3] for a panel of outputs: to[k, channel, 32].
  void (*weight)(const float* w, int64_t channels, float* to);
  /// The same for a panel of channels, taps being turned around: to[k, output, 32].
  void (*turned_weight)(const float* w, int64_t outputs, int64_t channels, float* to);
  void (*product)(const WinogradProduct& p);
  /// G^T m G into dw [32, 3, 3] of one output and a panel of channels; m[k, 32] with `place` from
  /// one k to the next.
  void (*weight_grad)(const float* m, int64_t place, float* dw);
};

}  // namespace tessera::cpu
