// F(2 x 2, 3 x 3): a tile of 2 x 2 places of the output sees 4 x 4 pixels of the input, and takes
// 16 multiplications for each pair of channels instead of 36. y = A^T [(G w G^T) (B^T d B)] A,
// where the product in the middle is one over channels for each of 16 places. The gradient by the
// input is the same with the weight turned around; that by the weight, dw = G^T [(B^T d B) (A g
// A^T)] G, sums over tiles instead. Tiles go in blocks whose transformed values stay in the second
// cache. Invariant: an element of activations is summed over channels from the first to the last,
// one of a weight over tiles, in blocks that depend on shapes alone: bits do not depend on threads.
#include "core/backend/cpu/conv_winograd.h"

#include <algorithm>
#include <vector>

#include "core/backend/cpu/channels_last.h"
#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/kernels/conv_winograd_table.h"
#include "core/base/parallel.h"

namespace tessera::cpu {
namespace {

constexpr int64_t kPanel = kWinogradPanel, kPlaces = kWinogradPlaces, kGroup = kWinogradGroup;
constexpr int64_t kBlockBytes = 512 * 1024;  // of transformed values of a block of activations
constexpr int64_t kLeastTiles = 32;          // of a problem, and of its blocks

int64_t pieces(int64_t n, int64_t size) { return (n + size - 1) / size; }
int64_t rounded(int64_t n, int64_t to) { return pieces(n, to) * to; }

// Pixels (n, h, w) of rows of channels.
template <class T>
struct Image {
  T* data;
  int64_t height, width, channels;
  T* at(int64_t n, int64_t h, int64_t w) const {
    return data + ((n * height + h) * width + w) * channels;
  }
};

// Tiles of `each` x `each` pixels of an image whose tile (i, j) begins at pixel (2 i - pad[0], 2 j
// - pad[1]); pixels outside of it are `outside`.
template <class T>
class Tiles {
 public:
  Tiles(const Image<T>& image, int64_t each, const int64_t (&pad)[2], int64_t rows, int64_t columns,
        T* outside)
      : image_(image),
        each_(each),
        pad_{pad[0], pad[1]},
        rows_(rows),
        columns_(columns),
        outside_(outside) {}
  // Pointers to the pixels of tiles [first, first + count); those from `end` on are outside.
  void find(int64_t first, int64_t count, int64_t end, T** to) const {
    int64_t j = first % columns_, i = first / columns_ % rows_, n = first / columns_ / rows_;
    for (int64_t t = first; t < first + count; ++t, to += each_ * each_) {
      const int64_t h = 2 * i - pad_[0], w = 2 * j - pad_[1];
      if (t >= end) {
        std::fill_n(to, each_ * each_, outside_);
        continue;
      }
      if (h >= 0 && h + each_ <= image_.height && w >= 0 && w + each_ <= image_.width) {
        T* row = image_.at(n, h, w);
        for (int64_t a = 0; a < each_; ++a, row += image_.width * image_.channels)
          for (int64_t b = 0; b < each_; ++b) to[a * each_ + b] = row + b * image_.channels;
      } else {
        for (int64_t a = 0; a < each_; ++a)
          for (int64_t b = 0; b < each_; ++b) to[a * each_ + b] = pixel(n, h + a, w + b);
      }
      if (++j == columns_) {
        j = 0;
        if (++i == rows_) i = 0, ++n;
      }
    }
  }

 private:
  T* pixel(int64_t n, int64_t h, int64_t w) const {
    const bool inside = h >= 0 && h < image_.height && w >= 0 && w < image_.width;
    return inside ? image_.at(n, h, w) : outside_;
  }
  Image<T> image_;
  int64_t each_, pad_[2], rows_, columns_;
  T* outside_;
};

template <class T>
Image<T> image_of(const Meta& m, T* data) {
  return {data, m.shape[2], m.shape[3], m.shape[1]};
}

// ---- activations

// A result [N, outputs, ..] in tiles, from an operand [N, channels, ..] with `pad` around it.
struct Work {
  int64_t channels, outputs, rows, columns, tiles, block, pad[2];

  Work(ConvRole role, const ConvAttributes::Window& window, const Meta& x, const Meta& w,
       const Meta& y) {
    const bool out = role == ConvRole::kOutput;
    const Shape& result = out ? y.shape : x.shape;
    channels = w.shape[out ? 1 : 0], outputs = w.shape[out ? 0 : 1];
    rows = pieces(result[2], 2), columns = pieces(result[3], 2);
    tiles = result[0] * rows * columns;
    for (int i = 0; i < 2; ++i) pad[i] = out ? window.pad_begin[i] : 2 - window.pad_begin[i];
    block = std::min(
        std::max<int64_t>(kBlockBytes / (4 * kPlaces * channels) / kGroup * kGroup, kLeastTiles),
        rounded(tiles, kGroup));
  }
  int64_t blocks() const { return pieces(tiles, block); }
  int64_t shares() const { return std::min<int64_t>(num_threads(), blocks()); }
  // In floats: the weight; and for each share values of a block, products of a panel, a row of
  // zeros and one that nobody reads.
  int64_t weight() const { return kPlaces * channels * outputs; }
  int64_t values() const { return kPlaces * block * channels; }
  int64_t products() const { return kPlaces * block * kPanel; }
  int64_t spare() const { return std::max(channels, outputs); }
  int64_t share() const { return values() + products() + 2 * spare(); }
  size_t workspace() const { return size_t(weight() + shares() * share()) * sizeof(float); }
};

// What a share computes in.
struct Buffers {
  float *values, *products, *zeros, *spare;
  std::vector<const float*> from;  // pixels of tiles
  std::vector<float*> to;
  Buffers(const Work& w, float* at)
      : values(at),
        products(values + w.values()),
        zeros(products + w.products()),
        spare(zeros + w.spare()),
        from(size_t(16 * w.block)),
        to(size_t(4 * w.block)) {}
};

void transform_weight(ConvRole role, const Work& w, const float* weight, float* to) {
  const auto& fns = simd<ConvWinogradTable>();
  parallel_for(w.outputs / kPanel, 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      float* panel = to + p * kPlaces * w.channels * kPanel;
      if (role == ConvRole::kOutput)
        fns.weight(weight + p * kPanel * w.channels * 9, w.channels, panel);
      else
        fns.turned_weight(weight + p * kPanel * 9, w.channels, w.outputs, panel);
    }
  });
}

// Tiles [first, first + count) of the result, `weight` being transformed.
void run_block(const Work& w, const Image<const float>& from, const Image<float>& to,
               const float* weight, int64_t first, Buffers& b) {
  constexpr int64_t kAtOrigin[2] = {0, 0};
  const auto& fns = simd<ConvWinogradTable>();
  const int64_t count = std::min(w.block, w.tiles - first), rows = rounded(count, kGroup);
  Tiles<const float>(from, 4, w.pad, w.rows, w.columns, b.zeros)
      .find(first, rows, w.tiles, b.from.data());
  Tiles<float>(to, 2, kAtOrigin, w.rows, w.columns, b.spare)
      .find(first, count, w.tiles, b.to.data());
  fns.input(b.from.data(), rows, w.channels, {b.values, rows * w.channels, w.channels, kPanel});
  for (int64_t p = 0; p < w.outputs / kPanel; ++p) {
    for (int64_t k = 0; k < kPlaces; ++k, weight += w.channels * kPanel)
      fns.product({b.values + k * rows * w.channels, kGroup * w.channels, w.channels, 1, weight,
                   b.products + k * rows * kPanel, rows / kGroup, w.channels, false});
    fns.output(b.products, rows * kPanel, count, b.to.data());
    for (float*& pixel : b.to) pixel += kPanel;
  }
}

void run_activations(ConvRole role, const Work& w, const Image<const float>& from,
                     const Image<float>& to, const float* weight, float* work) {
  float* transformed = work;
  transform_weight(role, w, weight, transformed);
  const int64_t shares = w.shares();
  parallel_for(shares, 1, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      Buffers b(w, work + w.weight() + s * w.share());
      std::fill_n(b.zeros, w.spare(), 0.0f);
      for (int64_t i = w.blocks() * s / shares; i < w.blocks() * (s + 1) / shares; ++i)
        run_block(w, from, to, transformed, i * w.block, b);
    }
  });
}

// ---- weights

// dw [outputs, channels, 3, 3] from tiles of y in blocks.
struct WeightWork {
  int64_t channels, outputs, rows, columns, tiles, block, pad[2];

  WeightWork(const ConvAttributes::Window& window, const Meta& w, const Meta& y)
      : channels(w.shape[1]),
        outputs(w.shape[0]),
        rows(pieces(y.shape[2], 2)),
        columns(pieces(y.shape[3], 2)),
        tiles(y.shape[0] * rows * columns),
        block(std::min<int64_t>(std::max<int64_t>(64, std::min(channels, outputs) / 2), tiles)),
        pad{window.pad_begin[0], window.pad_begin[1]} {}
  // In floats: sums, transformed x and g, a row of zeros.
  int64_t sums() const { return kPlaces * channels * outputs; }
  int64_t x_values() const { return kPlaces * block * channels; }
  int64_t g_values() const { return kPlaces * block * outputs; }
  int64_t zeros() const { return std::max(channels, outputs); }
  size_t workspace() const {
    return size_t(sums() + x_values() + g_values() + zeros()) * sizeof(float);
  }
};

struct WeightBuffers {
  float *sums, *x, *g, *zeros;
  std::vector<const float*> x_pixels, g_pixels;
  WeightBuffers(const WeightWork& w, void* work)
      : sums(static_cast<float*>(work)),
        x(sums + w.sums()),
        g(x + w.x_values()),
        zeros(g + w.g_values()),
        x_pixels(size_t(16 * w.block)),
        g_pixels(size_t(4 * w.block)) {}
};

// Adds tiles [first, first + count) to the sums, or begins them with it.
void sum_block(const WeightWork& w, const Image<const float>& x, const Image<const float>& g,
               int64_t first, WeightBuffers& b) {
  constexpr int64_t kAtOrigin[2] = {0, 0};
  const auto& fns = simd<ConvWinogradTable>();
  const int64_t count = std::min(w.block, w.tiles - first), panel = count * kPanel,
                x_place = count * w.channels, g_place = count * w.outputs;
  const Tiles<const float> x_tiles(x, 4, w.pad, w.rows, w.columns, b.zeros),
      g_tiles(g, 2, kAtOrigin, w.rows, w.columns, b.zeros);
  parallel_for(count, 8, [&](int64_t begin, int64_t end) {
    const int64_t n = end - begin;
    x_tiles.find(first + begin, n, w.tiles, &b.x_pixels[size_t(16 * begin)]);
    g_tiles.find(first + begin, n, w.tiles, &b.g_pixels[size_t(4 * begin)]);
    fns.input(&b.x_pixels[size_t(16 * begin)], n, w.channels,
              {b.x + begin * kPanel, x_place, kPanel, panel});
    fns.cotangent(&b.g_pixels[size_t(4 * begin)], n, w.outputs,
                  {b.g + begin * kPanel, g_place, kPanel, panel});
  });
  const int64_t panels = w.channels / kPanel;
  parallel_for(kPlaces * panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      const int64_t k = at / panels, p = at % panels;
      for (int64_t o = 0; o < w.outputs; o += kPanel)
        fns.product({b.g + k * g_place + o * count, kGroup, 1, kPanel,
                     b.x + k * x_place + p * panel, b.sums + (at * w.outputs + o) * kPanel,
                     kPanel / kGroup, count, first > 0});
    }
  });
}

void run_weight(const WeightWork& w, const Image<const float>& x, const Image<const float>& g,
                float* dw, void* work) {
  WeightBuffers b(w, work);
  std::fill_n(b.zeros, w.zeros(), 0.0f);
  for (int64_t first = 0; first < w.tiles; first += w.block) sum_block(w, x, g, first, b);
  const int64_t panels = w.channels / kPanel;
  parallel_for(w.outputs, 8, [&](int64_t begin, int64_t end) {
    for (int64_t o = begin; o < end; ++o)
      for (int64_t p = 0; p < panels; ++p)
        simd<ConvWinogradTable>().weight_grad(b.sums + (p * w.outputs + o) * kPanel,
                                              w.channels * w.outputs,
                                              dw + (o * w.channels + p * kPanel) * 9);
  });
}

}  // namespace

bool suits_conv_winograd(const ConvAttributes::Window& window, const Meta& x, const Meta& w,
                         const Meta& y) {
  constexpr size_t kMostBytes = size_t(128) << 20;  // of the transformed weight
  if (x.dtype != kF32 || window.groups != 1 || window.stride.size() != 2) return false;
  if (current_isa() != Isa::kV4) return false;
  for (int i = 0; i < 2; ++i)
    if (w.shape[i + 2] != 3 || window.stride[i] != 1 || window.dilation[i] != 1 ||
        window.pad_begin[i] > 2)
      return false;
  if (w.shape[0] % kPanel || w.shape[1] % kPanel) return false;
  if (size_t(kPlaces * w.shape[0] * w.shape[1]) * sizeof(float) > kMostBytes) return false;
  return y.shape[0] * pieces(y.shape[2], 2) * pieces(y.shape[3], 2) >= kLeastTiles;
}

size_t conv_winograd_workspace(ConvRole role, const ConvAttributes::Window& window, const Meta& x,
                               const Meta& w, const Meta& y) {
  return role == ConvRole::kWeight ? WeightWork(window, w, y).workspace()
                                   : Work(role, window, x, w, y).workspace();
}

void run_conv_winograd(ConvRole role, const ConvAttributes::Window& window, const Tensor& x,
                       const Tensor& w, const Tensor& y, Workspace work) {
  Tensor own;
  if (const size_t bytes = conv_winograd_workspace(role, window, x.meta(), w.meta(), y.meta());
      bytes > work.bytes)  // planned with fewer threads
    own = empty({int64_t(bytes)}, kU8), work = {own.raw(), bytes};
  auto read = [](const Tensor& t) { return image_of(t.meta(), t.values<float>()); };
  if (role == ConvRole::kWeight)
    return run_weight(WeightWork(window, w.meta(), y.meta()), read(x), read(y), w.data<float>(),
                      work.data);
  const Tensor weight = w.is_contiguous() ? w : dense_copy(w);
  const bool out = role == ConvRole::kOutput;
  const Tensor &from = out ? x : y, &to = out ? y : x;
  run_activations(role, Work(role, window, x.meta(), w.meta(), y.meta()), read(from),
                  image_of(to.meta(), to.data<float>()), weight.values<float>(),
                  static_cast<float*>(work.data));
}

}  // namespace tessera::cpu
