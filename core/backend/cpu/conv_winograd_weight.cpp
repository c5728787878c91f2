// dw = G^T [(B^T d B) (A g A^T)] G, summed over tiles of the output: d and g are transformed block
// by block, a product for each place of the transformed domain adds a block to the sums, and these
// are transformed at the end. Invariant: an element is the sum of blocks, each summed from its
// first tile to its last, that depend on shapes alone: bits do not depend on threads.
#include <vector>

#include "core/backend/cpu/conv_winograd.h"
#include "core/backend/cpu/conv_winograd_tiles.h"
#include "core/base/parallel.h"

namespace tessera::cpu {
namespace {

constexpr int64_t kPanel = kWinogradPanel, kGroup = kWinogradGroup;

template <class E>
struct Work {
  static constexpr int64_t kOut = kWinogradTile<E>, kIn = kOut + 2, kPlaces = kWinogradPlaces<E>;
  int64_t channels, outputs, rows, columns, tiles, block;

  Work(const Meta& w, const Meta& y)
      : channels(w.shape[1]),
        outputs(w.shape[0]),
        rows(pieces(y.shape[2], kOut)),
        columns(pieces(y.shape[3], kOut)),
        tiles(y.shape[0] * rows * columns),
        block(std::min<int64_t>(std::max<int64_t>(64, std::min(channels, outputs) / 2), tiles)) {}
  // In floats: sums, transformed x and g, a row of zeros.
  int64_t sums() const { return kPlaces * channels * outputs; }
  int64_t x_values() const { return kPlaces * block * channels; }
  int64_t g_values() const { return kPlaces * block * outputs; }
  int64_t zeros() const { return std::max(channels, outputs); }
  size_t workspace() const {
    return size_t(sums() + x_values() + g_values() + zeros()) * sizeof(float);
  }
};

template <class E>
struct Buffers {
  float *sums, *x, *g, *zeros;
  std::vector<const E*> x_pixels, g_pixels;
  Buffers(const Work<E>& w, void* work)
      : sums(static_cast<float*>(work)),
        x(sums + w.sums()),
        g(x + w.x_values()),
        zeros(g + w.g_values()),
        x_pixels(size_t(w.kIn * w.kIn * w.block)),
        g_pixels(size_t(w.kOut * w.kOut * w.block)) {
    std::fill_n(zeros, w.zeros(), 0.0f);
  }
  const E* outside() const { return reinterpret_cast<const E*>(zeros); }
};

// Adds tiles [first, first + count) to the sums, or begins them with it.
template <class E>
void sum_block(const Work<E>& w, const Image<const E>& x, const Image<const E>& g,
               const int64_t (&pad)[2], int64_t first, Buffers<E>& b) {
  constexpr int64_t kOut = Work<E>::kOut, kIn = Work<E>::kIn;
  const TileGrid x_grid{w.rows, w.columns, kOut, {pad[0], pad[1]}},
      g_grid{w.rows, w.columns, kOut, {0, 0}};
  const int64_t count = std::min(w.block, w.tiles - first), panel = count * kPanel,
                x_place = count * w.channels, g_place = count * w.outputs;
  parallel_for(count, 8, [&](int64_t begin, int64_t end) {
    const int64_t n = end - begin;
    const E **x_pixels = &b.x_pixels[size_t(kIn * kIn * begin)],
            **g_pixels = &b.g_pixels[size_t(kOut * kOut * begin)];
    find_pixels(x, x_grid, kIn, first + begin, n, w.tiles, b.outside(), x_pixels);
    find_pixels(g, g_grid, kOut, first + begin, n, w.tiles, b.outside(), g_pixels);
    winograd<E>().input(x_pixels, n, w.channels, {b.x + begin * kPanel, x_place, kPanel, panel});
    winograd<E>().cotangent(g_pixels, n, w.outputs, {b.g + begin * kPanel, g_place, kPanel, panel});
  });
  const int64_t panels = w.channels / kPanel;
  parallel_for(Work<E>::kPlaces * panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      const int64_t k = at / panels, p = at % panels;
      for (int64_t o = 0; o < w.outputs; o += kPanel)
        simd<ConvWinogradTable>().product(
            {b.g + k * g_place + o * count, kGroup, 1, kPanel, b.x + k * x_place + p * panel,
             b.sums + (at * w.outputs + o) * kPanel, kPanel / kGroup, count, first > 0});
    }
  });
}

template <class E>
void run(const ConvAttributes::Window& window, const Tensor& x, const Tensor& dw, const Tensor& y,
         void* work) {
  const Work<E> w(dw.meta(), y.meta());
  const int64_t pad[2] = {window.pad_begin[0], window.pad_begin[1]};
  const Image<const E> from = image_to_read<E>(x), g = image_to_read<E>(y);
  Buffers<E> b(w, work);
  for (int64_t first = 0; first < w.tiles; first += w.block) sum_block(w, from, g, pad, first, b);
  E* to = static_cast<E*>(dw.raw());
  parallel_for(w.outputs, 8, [&](int64_t begin, int64_t end) {
    for (int64_t o = begin; o < end; ++o)
      for (int64_t c = 0; c < w.channels; c += kPanel)
        winograd<E>().weight_grad(b.sums + c * w.outputs + o * kPanel, w.channels * w.outputs,
                                  to + (o * w.channels + c) * 9);
  });
}

// Calls f.operator()<E>() for the elements of a dtype.
template <class F>
auto with_elements(DType t, F f) {
  return t == kF32 ? f.template operator()<float>() : f.template operator()<uint16_t>();
}

}  // namespace

bool suits_conv_winograd_weight(const Meta& w, const Meta& y) {
  constexpr size_t kMostBytes = size_t(128) << 20;  // of scratch
  return with_elements(y.dtype, [&]<class E>() {
    constexpr int64_t kLeastTiles = std::is_same_v<E, float> ? 32 : 96;
    const Work<E> of(w, y);
    return of.tiles >= kLeastTiles && of.workspace() <= kMostBytes &&
           fills_tiles(y.shape[2], y.shape[3], of.kOut);
  });
}

size_t conv_winograd_weight_workspace(const Meta& w, const Meta& y) {
  return with_elements(y.dtype, [&]<class E>() { return Work<E>(w, y).workspace(); });
}

void run_conv_winograd_weight(const ConvAttributes::Window& window, const Tensor& x,
                              const Tensor& dw, const Tensor& y, void* work) {
  with_elements(y.dtype(), [&]<class E>() { run<E>(window, x, dw, y, work); });
}

}  // namespace tessera::cpu
