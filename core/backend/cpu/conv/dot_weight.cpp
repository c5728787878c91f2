// dw[tap] = g' x[shifted by tap], summed over places of the output, in blocks of places that are
// packed into the second cache once for all taps: pairs of images, and rows of these where whole
// images are too many places. While a block is summed the next one's rows are fetched. The sums, of
// all taps, wait in scratch. Invariant: blocks depend on shapes alone, and threads share tiles
// of the result, so bits do not depend on the number of threads.
#include "core/backend/cpu/conv/dot_weight.h"

#include <algorithm>
#include <vector>

#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/kernels/conv_dot_table.h"
#include "core/base/boundary.h"

namespace tessera::cpu {
namespace {

// Places of a block, at most, where rows are not longer. Several taps read the same panels, and
// more places spare more turns of the sums; for one tap a side is to stay in the first cache.
constexpr int64_t kPlaces = limit("conv_dot_weight.places"),
                  kPlacesOfOneTap = limit("conv_dot_weight.places_of_one_tap");
constexpr int64_t kGroupBytes = 320 * 1024;  // of panels that tiles go through again and again
constexpr int64_t kLineUnits = 16;  // of a cache line, by which panels and sides are set apart

int64_t pieces(int64_t n, int64_t size) { return (n + size - 1) / size; }

// A sequence of bytes that the next block will read.
struct Range {
  const char* at;
  int64_t lines;
};

struct Work {
  int64_t pairs, channels, outputs, taps, height, width, rows, columns, kernel[2], stride[2],
      dilation[2], pad[2];
  bool sampled;  // only pixels that the one tap reads are packed
  int64_t block_pairs, block_rows, x_rows, x_columns, panel, side, group;

  Work(const ConvAttributes::Window& window, const Meta& x, const Meta& w, const Meta& y)
      : pairs(x.shape[0] / 2),
        channels(x.shape[1]),
        outputs(y.shape[1]),
        taps(w.shape[2] * w.shape[3]),
        height(x.shape[2]),
        width(x.shape[3]),
        rows(y.shape[2]),
        columns(y.shape[3]),
        sampled(taps == 1) {
    for (int i = 0; i < 2; ++i)
      kernel[i] = w.shape[i + 2], stride[i] = window.stride[i], dilation[i] = window.dilation[i],
      pad[i] = window.pad_begin[i];
    const int64_t places = sampled ? kPlacesOfOneTap : kPlaces,
                  blocks = pieces(rows * columns, places);
    block_rows = pieces(rows, std::min(blocks, rows));
    block_pairs = blocks > 1 ? 1 : std::clamp<int64_t>(places / (rows * columns), 1, pairs);
    x_rows =
        sampled ? block_rows : (block_rows - 1) * stride[0] + (kernel[0] - 1) * dilation[0] + 1;
    x_columns = sampled ? columns : (columns - 1) * stride[1] + (kernel[1] - 1) * dilation[1] + 1;
    panel = block_pairs * x_rows * x_columns * kDotPanel + kLineUnits;
    side = block_pairs * block_rows * columns * kDotSide + kLineUnits;
    // As many panels as fit, of those that divide all.
    const int64_t panels = channels / kDotPanel;
    group = std::clamp<int64_t>(kGroupBytes / (4 * panel), 1, panels);
    while (panels % group) --group;
  }
  void meet_limits() const {
    if (sampled)
      meet("conv_dot_weight.places_of_one_tap", rows * columns);
    else
      meet("conv_dot_weight.places", rows * columns);
    meet("conv_dot_weight.pairs", pairs, (sampled ? kPlacesOfOneTap : kPlaces) / (rows * columns));
    meet("conv_dot_weight.group", panels(), kGroupBytes / (4 * panel));
    meet("conv_dot_weight.half", taps), meet("conv_dot.taps", taps);
  }
  int64_t panels() const { return channels / kDotPanel; }
  int64_t sides() const { return outputs / kDotSide; }
  int64_t x_units() const { return panels() * panel; }
  int64_t g_units() const { return sides() * side; }
  // Tiles that are summed one after the other and then stored: of half a side and a group.
  int64_t run() const { return group * taps; }
  int64_t runs() const { return outputs / kDotTileRows * (panels() / group); }
  // Floats that wait for the next block, or that a thread needs for a run.
  int64_t sums() const { return (blocks() > 1 ? runs() : shares()) * run() * kDotTile; }
  int64_t shares() const { return std::min<int64_t>(num_threads(), runs()); }
  int64_t row_pieces() const { return pieces(rows, block_rows); }
  int64_t blocks() const { return pieces(pairs, block_pairs) * row_pieces(); }
  int64_t scratch() const { return pieces(dot_scratch(taps), 32) * 32; }
  // What decides whether this way is taken, and may not hang on the number of threads: packed
  // operands, and the sums of a thread for each run.
  int64_t bytes_on_any_threads() const {
    return 4 * (x_units() + g_units() + runs() * run() * kDotTile);
  }
  // In bytes: packed operands, sums, and what storing takes for each share.
  int64_t workspace() const {
    return 4 * (x_units() + g_units() + sums()) + 2 * shares() * scratch();
  }
};

// Pairs [pair, pair + pairs) of images and rows [row, row + rows) of the output.
struct Block {
  int64_t pair, pairs, row, rows;
  Block(const Work& w, int64_t at)
      : pair(at / w.row_pieces() * w.block_pairs),
        pairs(std::min(w.block_pairs, w.pairs - pair)),
        row(at % w.row_pieces() * w.block_rows),
        rows(std::min(w.block_rows, w.rows - row)) {}
};

struct Buffers {
  uint32_t *x, *g;
  float* sums;
  uint16_t* scratch;
};

// The row of x that row i of a block's packed rows holds; outside of x: zeros.
int64_t row_of_x(const Work& w, const Block& b, int64_t i) {
  return w.sampled ? (b.row + i) * w.stride[0] - w.pad[0] : b.row * w.stride[0] - w.pad[0] + i;
}
int64_t rows_of_x(const Work& w, const Block& b) {
  return w.sampled ? b.rows : (b.rows - 1) * w.stride[0] + (w.kernel[0] - 1) * w.dilation[0] + 1;
}

// Row i of pair p of the block's x.
void pack_row_of_x(const Work& w, const Block& b, const uint16_t* x, int64_t p, int64_t i,
                   uint32_t* to) {
  const auto& fns = simd<ConvDotTable>();
  const int64_t image = w.height * w.width * w.channels, h = row_of_x(w, b, i),
                step = w.sampled ? w.stride[1] : 1;
  to += (p * rows_of_x(w, b) + i) * w.x_columns * kDotPanel;
  // Columns [0, first) and [end, x_columns) are outside of x.
  int64_t first = 0, end = 0;
  if (h >= 0 && h < w.height) {
    first = std::clamp<int64_t>(pieces(w.pad[1], step), 0, w.x_columns);
    end = std::clamp<int64_t>(pieces(w.width + w.pad[1], step), first, w.x_columns);
  }
  const uint16_t* row =
      x + (b.pair + p) * 2 * image + (h * w.width + first * step - w.pad[1]) * w.channels;
  fns.pack_panels({nullptr, nullptr, first, 0, w.channels}, to, w.panel);
  if (end > first)
    fns.pack_panels({row, row + image, end - first, step * w.channels, w.channels},
                    to + first * kDotPanel, w.panel);
  fns.pack_panels({nullptr, nullptr, w.x_columns - end, 0, w.channels}, to + end * kDotPanel,
                  w.panel);
}

void pack_row_of_g(const Work& w, const Block& b, const uint16_t* g, int64_t p, int64_t i,
                   uint32_t* to) {
  const int64_t image = w.rows * w.columns * w.outputs;
  const uint16_t* row = g + (b.pair + p) * 2 * image + (b.row + i) * w.columns * w.outputs;
  simd<ConvDotTable>().pack_sides({row, row + image, w.columns, w.outputs, w.outputs},
                                  to + (p * b.rows + i) * w.columns * kDotSide, w.side);
}

void pack(const Work& w, const Block& b, const uint16_t* x, const uint16_t* g, const Buffers& to) {
  const int64_t of_x = rows_of_x(w, b), each = of_x + b.rows;
  parallel_for("conv_dot_weight.pack_threads", b.pairs * each, 4, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      const int64_t p = at / each, i = at % each;
      if (i < of_x)
        pack_row_of_x(w, b, x, p, i, to.x);
      else
        pack_row_of_g(w, b, g, p, i - of_x, to.g);
    }
  });
}

// What packing a block will read.
std::vector<Range> ranges(const Work& w, const Block& b, const uint16_t* x, const uint16_t* g) {
  std::vector<Range> all;
  auto add = [&](const uint16_t* from, int64_t elements) {
    const char* at = reinterpret_cast<const char*>(from);
    if (!all.empty() && all.back().at + all.back().lines * 64 == at)
      all.back().lines += elements * 2 / 64;
    else
      all.push_back({at, elements * 2 / 64});
  };
  for (int64_t n = 2 * b.pair; n < 2 * (b.pair + b.pairs); ++n) {
    for (int64_t i = 0; i < rows_of_x(w, b); ++i)
      if (int64_t h = row_of_x(w, b, i); h >= 0 && h < w.height)
        add(x + (n * w.height + h) * w.width * w.channels, w.width * w.channels);
    add(g + (n * w.rows + b.row) * w.columns * w.outputs, b.rows * w.columns * w.outputs);
  }
  return all;
}

// Lines to fetch, shared by tiles.
class Shares {
 public:
  Shares(std::vector<Range> all, int64_t tiles) : ranges_(std::move(all)) {
    for (const Range& r : ranges_) total_ += r.lines;
    each_ = pieces(total_, tiles);
  }
  // Where the lines of a tile begin; null: none.
  const char* of(int64_t tile) const {
    int64_t line = tile * each_;
    for (const Range& r : ranges_) {
      if (line < r.lines) return r.at + line * 64;
      line -= r.lines;
    }
    return nullptr;
  }

 private:
  std::vector<Range> ranges_;
  int64_t total_ = 0, each_ = 0;
};

DotWalk walk_of(const Work& w, const Block& b) {
  const int64_t x_rows = rows_of_x(w, b);
  if (w.sampled) return {1, 0, 1, 0, b.pairs * b.rows * w.columns, kDotPanel};
  return {b.pairs,   x_rows * w.x_columns * kDotPanel,
          b.rows,    w.stride[0] * w.x_columns * kDotPanel,
          w.columns, w.stride[1] * kDotPanel};
}

// Adds a block to the sums, or begins them with it; with `dw` they are complete.
void sum(const Work& w, const Block& b, const Buffers& of, bool add, const Shares& ahead,
         uint16_t* dw) {
  const auto& fns = simd<ConvDotTable>();
  const DotWalk walk = walk_of(w, b);
  const int64_t rows = w.outputs / kDotTileRows, shares = w.shares();
  auto run = [&](int64_t at, int64_t share) {
    const int64_t first = at / rows * w.group, row = at % rows, side = row / 2, half = row % 2;
    int64_t tile = at * w.run();
    float* sums = of.sums + (w.blocks() > 1 ? at : share) * w.run() * kDotTile;
    for (int64_t i = 0; i < w.run(); ++i, ++tile) {
      const int64_t p = first + i / w.taps, t = i % w.taps,
                    place = t / w.kernel[1] * w.dilation[0] * w.x_columns +
                            t % w.kernel[1] * w.dilation[1];
      const char* fetch = ahead.of(tile);
      fns.tile(walk, of.g + side * w.side + half * kDotTileRows,
               of.x + p * w.panel + place * kDotPanel, sums + i * kDotTile, add,
               fetch ? fetch : reinterpret_cast<const char*>(of.sums), fetch ? 128 : 0);
    }
    if (dw)
      fns.store(sums, w.group, w.taps,
                dw + ((side * kDotSide + half * 4) * w.channels + first * kDotPanel) * w.taps,
                w.channels * w.taps, of.scratch + share * w.scratch());
  };
  parallel_for("conv_dot_weight.shares", shares, 1, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s)
      for (int64_t at = w.runs() * s / shares; at < w.runs() * (s + 1) / shares; ++at) run(at, s);
  });
}

}  // namespace

bool suits_conv_dot_weight(const ConvAttributes::Window& window, const Meta& x, const Meta& w,
                           const Meta& y) {
  constexpr int64_t kMostBytes = int64_t(128) << 20;  // of scratch
  if (x.dtype != kBF16 || window.groups != 1 || window.stride.size() != 2 || !has_bf16_dot())
    return false;
  if (x.shape[0] % 2 || x.shape[1] % kDotPanel) return false;
  meet("conv_dot_weight.outputs", y.shape[1]);
  if (y.shape[1] % kDotSide) return false;
  return Work(window, x, w, y).bytes_on_any_threads() <= kMostBytes;
}

size_t conv_dot_weight_workspace(const ConvAttributes::Window& window, const Meta& x, const Meta& w,
                                 const Meta& y) {
  return size_t(Work(window, x, w, y).workspace());
}

void run_conv_dot_weight(const ConvAttributes::Window& window, const Tensor& x, const Tensor& dw,
                         const Tensor& y, void* work) {
  const Work w(window, x.meta(), dw.meta(), y.meta());
  w.meet_limits();
  auto* x_units = static_cast<uint32_t*>(work);
  uint32_t* g_units = x_units + w.x_units();
  auto* sums = reinterpret_cast<float*>(g_units + w.g_units());
  const Buffers buffers{x_units, g_units, sums, reinterpret_cast<uint16_t*>(sums + w.sums())};
  const auto *from = static_cast<const uint16_t*>(x.raw_values()),
             *g = static_cast<const uint16_t*>(y.raw_values());
  for (int64_t i = 0, blocks = w.blocks(); i < blocks; ++i) {
    const Block block(w, i);
    const bool last = i + 1 == blocks;
    pack(w, block, from, g, buffers);
    sum(w, block, buffers, i > 0,
        Shares(last ? std::vector<Range>() : ranges(w, Block(w, i + 1), from, g),
               w.runs() * w.run()),
        last ? static_cast<uint16_t*>(dw.raw()) : nullptr);
  }
}

}  // namespace tessera::cpu
