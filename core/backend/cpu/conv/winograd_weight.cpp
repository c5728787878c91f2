// dw = G^T [(B^T d B) (A g A^T)] G, summed over tiles of the output, in blocks of tiles. All of a
// block is transformed; then a group of outputs and a panel of channels after the other has its
// products, one for each place of the transformed domain, which stay in the second cache and are
// transformed back at once. Invariant: an element is the sum of blocks, each summed from its first
// tile to its last, that depend on shapes alone: bits do not depend on threads.
#include <vector>

#include "core/backend/cpu/conv/winograd.h"
#include "core/backend/cpu/conv/winograd_tiles.h"
#include "core/base/boundary.h"

namespace tessera::cpu {
namespace {

constexpr int64_t kPanel = kWinogradPanel, kGroup = kWinogradGroup;
constexpr int64_t kRows = 32;  // outputs whose products are in work
constexpr int64_t kTogether =
    limit("winograd_weight.together");  // tiles whose pixels are found together
constexpr int64_t kApart = 32;  // floats between places, so that they spread over the caches

template <class E>
struct Work {
  const WinogradGradFns<E>& fns;
  int64_t edge, places, channels, outputs, rows, columns, tiles, block;

  Work(const WinogradGradFns<E>& f, const Meta& w, const Meta& y)
      : fns(f),
        edge(f.tile),
        places((edge + 2) * (edge + 2)),
        channels(w.shape[1]),
        outputs(w.shape[0]),
        rows(pieces(y.shape[2], edge)),
        columns(pieces(y.shape[3], edge)),
        tiles(y.shape[0] * rows * columns) {
    // As many tiles as leave transformed x and g in the third cache, and enough for the way back.
    constexpr int64_t kFloats = 1408 * 1024, kLeast = 32, kMost = 512;
    const int64_t most = std::clamp(kFloats / (places * (channels + outputs)), kLeast, kMost);
    block = pieces(tiles, pieces(tiles, most));
    meet("winograd_weight.block", tiles, most);
  }
  int64_t blocks() const { return pieces(tiles, block); }
  // In floats: from a place to the next, from a panel to the next.
  int64_t place() const { return block * kPanel + kApart; }
  int64_t panel() const { return places * place(); }
  // Pieces of the result that are summed alone.
  int64_t runs() const { return channels / kPanel * (outputs / kRows); }
  int64_t shares() const { return std::min<int64_t>(num_threads(), runs()); }
  // In floats: transformed x and g, products of a share, sums that wait for the next block, a row
  // of zeros.
  int64_t x_values() const { return channels / kPanel * panel(); }
  int64_t g_values() const { return outputs / kPanel * panel(); }
  int64_t row() const { return places * kPanel + kApart; }
  int64_t products() const { return kRows * row(); }
  int64_t sums() const { return blocks() > 1 ? 9 * channels * outputs : 0; }
  int64_t zeros() const { return std::max(channels, outputs); }
  size_t workspace() const {
    return size_t(x_values() + g_values() + shares() * products() + sums() + zeros()) *
           sizeof(float);
  }
  // Vector instructions for a vector of the result: products, transforms of operands and back.
  double cost() const {
    const double back = edge == 7 ? 400 : 250;
    return double(places * tiles) * (1 + 10.0 / double(channels) + 10.0 / double(outputs)) + back;
  }
};

struct Buffers {
  float *x, *g, *products, *sums, *zeros;
  template <class E>
  Buffers(const Work<E>& w, void* work)
      : x(static_cast<float*>(work)),
        g(x + w.x_values()),
        products(g + w.g_values()),
        sums(products + w.shares() * w.products()),
        zeros(sums + w.sums()) {
    std::fill_n(zeros, w.zeros(), 0.0f);
  }
};

template <class E>
struct Operands {
  Image<const E> x, g;
  int64_t pad[2];
  E* dw;
};

// Tiles [first, first + count).
template <class E>
void transform(const Work<E>& w, const Operands<E>& o, int64_t first, int64_t count,
               const Buffers& b) {
  const int64_t in = w.edge + 2;
  const TileGrid x_grid{w.rows, w.columns, w.edge, {o.pad[0], o.pad[1]}},
      g_grid{w.rows, w.columns, w.edge, {0, 0}};
  const E* outside = reinterpret_cast<const E*>(b.zeros);
  meet("winograd_weight.together", count);
  parallel_for("winograd_weight.threads", pieces(count, kTogether), 1,
               [&](int64_t begin, int64_t end) {
                 std::vector<const E*> pixels(size_t(in * in * kTogether));
                 for (int64_t at = begin * kTogether; at < std::min(end * kTogether, count);
                      at += kTogether) {
                   const int64_t n = std::min(kTogether, count - at);
                   find_pixels(o.x, x_grid, in, first + at, n, w.tiles, outside, pixels.data());
                   w.fns.input(pixels.data(), n, w.channels,
                               {b.x + at * kPanel, w.place(), kPanel, w.panel()});
                   find_pixels(o.g, g_grid, w.edge, first + at, n, w.tiles, outside, pixels.data());
                   w.fns.cotangent(pixels.data(), n, w.outputs,
                                   {b.g + at * kPanel, w.place(), kPanel, w.panel()});
                 }
               });
}

// Products of a block of `count` tiles, number `block` of them.
template <class E>
void sum(const Work<E>& w, const Operands<E>& o, int64_t block, int64_t count, const Buffers& b) {
  const int64_t shares = w.shares(), groups = w.outputs / kRows;
  const bool last = block + 1 == w.blocks();
  auto run = [&](int64_t at, float* products) {
    const int64_t p = at / groups, first = at % groups * kRows;
    const float *x = b.x + p * w.panel(), *g = b.g + first / kPanel * w.panel() + first % kPanel;
    for (int64_t k = 0; k < w.places; ++k, x += w.place(), g += w.place())
      simd<ConvWinogradTable>().product(
          {g, kGroup, 1, kPanel, x, products + k * kPanel, w.row(), kRows / kGroup, count});
    for (int64_t i = 0; i < kRows; ++i) {
      const int64_t element = (first + i) * w.channels + p * kPanel;
      w.fns.weight_grad(products + i * w.row(), b.sums + element * 9, block > 0,
                        last ? o.dw + element * 9 : nullptr);
    }
  };
  parallel_for("winograd_weight.shares", shares, 1, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s)
      for (int64_t at = w.runs() * s / shares; at < w.runs() * (s + 1) / shares; ++at)
        run(at, b.products + s * w.products());
  });
}

// Calls f(work) with the tiles that are best for a dtype.
template <class F>
auto with_work(const Meta& w, const Meta& y, F f) {
  const ConvWinogradTable& table = simd<ConvWinogradTable>();
  if (y.dtype == kF32) return f(Work<float>(table.f32, w, y));
  const Work<uint16_t> small(table.bf16[0], w, y), large(table.bf16[1], w, y);
  return f(small.cost() < large.cost() ? small : large);
}

}  // namespace

bool suits_conv_winograd_weight(const Meta& w, const Meta& y) {
  constexpr size_t kMostBytes = size_t(128) << 20;  // of scratch
  return with_work(w, y, [&]<class E>(const Work<E>& of) {
    if (of.workspace() > kMostBytes) return false;
    if constexpr (std::is_same_v<E, float>) {
      constexpr int64_t kLeastTiles = limit("winograd_weight.least_tiles");
      meet("winograd_weight.least_tiles", of.tiles);
      return of.tiles >= kLeastTiles && fills_tiles(y.shape[2], y.shape[3], of.edge);
    } else {
      // Dot instructions take two products at once, and reach 0.9 of their peak.
      return of.cost() < 9 * double(y.shape[0] * y.shape[2] * y.shape[3]) / 2 / 0.9;
    }
  });
}

size_t conv_winograd_weight_workspace(const Meta& w, const Meta& y) {
  return with_work(w, y, [](const auto& of) { return of.workspace(); });
}

void run_conv_winograd_weight(const ConvAttributes::Window& window, const Tensor& x,
                              const Tensor& dw, const Tensor& y, void* work) {
  with_work(dw.meta(), y.meta(), [&]<class E>(const Work<E>& w) {
    const Operands<E> o{image_to_read<E>(x),
                        image_to_read<E>(y),
                        {window.pad_begin[0], window.pad_begin[1]},
                        static_cast<E*>(dw.raw())};
    const Buffers b(w, work);
    for (int64_t i = 0; i < w.blocks(); ++i) {
      const int64_t first = i * w.block, count = std::min(w.block, w.tiles - first);
      transform(w, o, first, count, b);
      sum(w, o, i, count, b);
    }
  });
}

}  // namespace tessera::cpu
