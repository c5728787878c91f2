// y = A^T [(G w G^T) (B^T d B)] A for each tile of n x n places of y, where d are the pixels that
// it sees, and the product in the middle is one over channels for each of (n + 2)^2 places. The
// gradient by the input is the same with the weight turned around. All of the weight is transformed
// first; then tiles go in blocks. Invariant: an element is summed over channels from the first to
// the last, wherever its tile is and whatever else is in the batch.
#include "core/backend/cpu/conv/winograd.h"

#include <vector>

#include "core/backend/cpu/channels_last.h"
#include "core/backend/cpu/conv/winograd_tiles.h"
#include "core/base/boundary.h"

namespace tessera::cpu {
namespace {

constexpr int64_t kPanel = kWinogradPanel, kGroup = kWinogradGroup;
constexpr int64_t kOut = kWinogradTile, kIn = kOut + 2, kPlaces = kIn * kIn;

// The tiles of a block that leave its transformed values in the second cache; with many channels
// still 32 of them, for each block reads all of the weight.
int64_t block_of(int64_t channels) {
  constexpr int64_t kBytes = 384 * 1024, kLeastGroups = 4;
  const int64_t group_bytes = int64_t(sizeof(float)) * kPlaces * channels * kGroup;
  return std::max(kBytes / group_bytes, kLeastGroups) * kGroup;
}

// A result [N, outputs, ..] in tiles, from an operand [N, channels, ..] with `pad` around it.
struct Work {
  int64_t channels, outputs, tiles, block;
  TileGrid from, to;

  Work(ConvRole role, const ConvAttributes::Window& window, const Meta& x, const Meta& w,
       const Meta& y) {
    const bool out = role == ConvRole::kOutput;
    const Shape& result = out ? y.shape : x.shape;
    channels = w.shape[out ? 1 : 0], outputs = w.shape[out ? 0 : 1];
    to = {pieces(result[2], kOut), pieces(result[3], kOut), kOut, {0, 0}};
    from = to;
    for (int i = 0; i < 2; ++i) from.pad[i] = out ? window.pad_begin[i] : 2 - window.pad_begin[i];
    tiles = result[0] * to.rows * to.columns;
    const int64_t fair = pieces(pieces(tiles, num_threads()), kGroup) * kGroup;
    block = std::min(block_of(channels), fair);
    meet("winograd.block", fair / kGroup, block_of(channels) / kGroup);
  }
  int64_t panels() const { return outputs / kPanel; }
  int64_t blocks() const { return pieces(tiles, block); }
  int64_t shares() const { return std::min<int64_t>(num_threads(), blocks()); }
  // In floats. All shares read the weight and a row of zeros; a share has values of a block,
  // products of a panel, and a row that is not read.
  int64_t panel() const { return kPlaces * channels * kPanel; }
  int64_t weight() const { return panels() * panel(); }
  int64_t values() const { return kPlaces * block * channels; }
  int64_t products() const { return kPlaces * block * kPanel; }
  int64_t spare() const { return std::max(channels, outputs); }
  int64_t share() const { return values() + products() + spare(); }
  size_t workspace() const {
    return size_t(weight() + spare() + shares() * share()) * sizeof(float);
  }
};

// What a share computes in.
struct Share {
  float *values, *products, *spare;
  std::vector<const float*> from;  // pixels of tiles
  std::vector<float*> to;
  Share(const Work& w, float* at)
      : values(at),
        products(values + w.values()),
        spare(products + w.products()),
        from(size_t(kIn * kIn * w.block)),
        to(size_t(kOut * kOut * w.block)) {}
};

void transform_weight(ConvRole role, const Work& w, const float* weight, float* to) {
  const auto& fns = simd<ConvWinogradTable>();
  parallel_for("winograd.panels", w.panels(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      float* panel = to + p * w.panel();
      if (role == ConvRole::kOutput)
        fns.weight(weight + p * kPanel * w.channels * 9, w.channels, panel);
      else
        fns.turned_weight(weight + p * kPanel * 9, w.channels, w.outputs, panel);
    }
  });
}

// The block of tiles that begins with number `first`, `weight` being transformed.
void run_block(const Work& w, const Image<const float>& from, const Image<float>& to,
               const float* weight, const float* zeros, int64_t first, Share& s) {
  const auto& fns = simd<ConvWinogradTable>();
  const int64_t count = std::min(w.block, w.tiles - first), rows = pieces(count, kGroup) * kGroup;
  meet("winograd.group", count);
  find_pixels(from, w.from, kIn, first, rows, w.tiles, zeros, s.from.data());
  find_pixels(to, w.to, kOut, first, count, w.tiles, s.spare, s.to.data());
  fns.f32.input(s.from.data(), rows, w.channels, {s.values, rows * w.channels, w.channels, kPanel});
  for (int64_t p = 0; p < w.panels(); ++p) {
    for (int64_t k = 0; k < kPlaces; ++k, weight += w.channels * kPanel)
      fns.product({s.values + k * rows * w.channels, kGroup * w.channels, w.channels, 1, weight,
                   s.products + k * rows * kPanel, kPanel, rows / kGroup, w.channels});
    fns.output(s.products, rows * kPanel, count, s.to.data(), p * kPanel);
  }
}

void run(ConvRole role, const Work& w, const Image<const float>& from, const Image<float>& to,
         const float* weight, float* memory) {
  float *transformed = memory, *zeros = transformed + w.weight(), *own = zeros + w.spare();
  std::fill_n(zeros, w.spare(), 0.0f);
  transform_weight(role, w, weight, transformed);
  const int64_t shares = w.shares();
  parallel_for("winograd.shares", shares, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      Share s(w, own + i * w.share());
      for (int64_t b = w.blocks() * i / shares; b < w.blocks() * (i + 1) / shares; ++b)
        run_block(w, from, to, transformed, zeros, b * w.block, s);
    }
  });
}

// Whether an image has tiles enough to pay for the transform of the weight, and the scratch is not
// too much. The number of images does not count, for a sample's bits must not depend on its batch.
bool suits_outputs(const Shape& result, const Meta& w) {
  constexpr int64_t kLeastTiles = limit("winograd.least_tiles"), kMostBytes = int64_t(64) << 20;
  const int64_t tiles = pieces(result[2], kOut) * pieces(result[3], kOut),
                weight_bytes = int64_t(sizeof(float)) * kPlaces * w.shape[0] * w.shape[1];
  meet("winograd.least_tiles", tiles);
  return tiles >= kLeastTiles && fills_tiles(result[2], result[3], kOut) &&
         weight_bytes <= kMostBytes;
}

}  // namespace

bool suits_conv_winograd(ConvRole role, const ConvAttributes::Window& window, const Meta& x,
                         const Meta& w, const Meta& y) {
  // Channels, which bounds the values of a block.
  constexpr int64_t kMost = limit("winograd.most_panels") * kPanel;
  const bool by_weight = role == ConvRole::kWeight,
             low = by_weight && x.dtype == kBF16 && has_bf16_dot();
  if ((x.dtype != kF32 && !low) || window.groups != 1 || window.stride.size() != 2) return false;
  if (current_isa() != Isa::kV4) return false;
  for (int i = 0; i < 2; ++i) {
    if (w.shape[i + 2] != 3 || window.stride[i] != 1 || window.dilation[i] != 1) return false;
    if (window.pad_begin[i] > 2) return false;
  }
  meet("winograd.channels", std::min(w.shape[0], w.shape[1]));
  meet("winograd.most_panels", std::max(w.shape[0], w.shape[1]) / kPanel);
  for (int i = 0; i < 2; ++i)
    if (w.shape[i] % kPanel || w.shape[i] > kMost) return false;
  return by_weight ? suits_conv_winograd_weight(w, y)
                   : suits_outputs(role == ConvRole::kOutput ? y.shape : x.shape, w);
}

size_t conv_winograd_workspace(ConvRole role, const ConvAttributes::Window& window, const Meta& x,
                               const Meta& w, const Meta& y) {
  return role == ConvRole::kWeight ? conv_winograd_weight_workspace(w, y)
                                   : Work(role, window, x, w, y).workspace();
}

void run_conv_winograd(ConvRole role, const ConvAttributes::Window& window, const Tensor& x,
                       const Tensor& w, const Tensor& y, void* work) {
  if (role == ConvRole::kWeight) return run_conv_winograd_weight(window, x, w, y, work);
  const Tensor weight = w.is_contiguous() ? w : dense_copy(w);
  const bool out = role == ConvRole::kOutput;
  run(role, Work(role, window, x.meta(), w.meta(), y.meta()), image_to_read<float>(out ? x : y),
      image_to_write<float>(out ? y : x), weight.values<float>(), static_cast<float*>(work));
}

}  // namespace tessera::cpu
