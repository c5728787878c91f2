// Tiles of images, which Winograd convolutions go by.
#pragma once
#include <algorithm>

#include "core/backend/cpu/isa.h"
#include "core/backend/cpu/kernels/conv_winograd_table.h"
#include "core/tensor/tensor.h"

namespace tessera::cpu {

inline int64_t pieces(int64_t n, int64_t size) { return (n + size - 1) / size; }

/// True where tiles of n x n are mostly filled with places of an image.
inline bool fills_tiles(int64_t height, int64_t width, int64_t n) {
  return 4 * height * width >= 3 * n * n * pieces(height, n) * pieces(width, n);
}

/// A tensor [N, C, H, W] as it lies channels-last; E may be const.
template <class E>
struct Image {
  E* data;
  int64_t height, width, channels;
  E* at(int64_t n, int64_t h, int64_t w) const {
    return data + ((n * height + h) * width + w) * channels;
  }
};
template <class E>
Image<const E> image_to_read(const Tensor& t) {
  const Shape& s = t.shape();
  return {static_cast<const E*>(t.raw_values()), s[2], s[3], s[1]};
}
template <class E>
Image<E> image_to_write(const Tensor& t) {
  const Shape& s = t.shape();
  return {static_cast<E*>(t.raw()), s[2], s[3], s[1]};
}

/// Where tiles are: tile (i, j) of an image, of `rows` x `columns`, begins `step` (i, j) pixels
/// after (-pad[0], -pad[1]).
struct TileGrid {
  int64_t rows, columns, step, pad[2];
};

/// Pointers to the pixels, row by row, of tiles [first, first + count), which have `edge` x `edge`;
/// `outside` for those beyond the image, and for all of tiles from number `end` on.
template <class E>
void find_pixels(const Image<E>& image, const TileGrid& grid, int64_t edge, int64_t first,
                 int64_t count, int64_t end, E* outside, E** to) {
  int64_t j = first % grid.columns, i = first / grid.columns % grid.rows,
          n = first / grid.columns / grid.rows;
  for (int64_t t = first; t < first + count; ++t, to += edge * edge) {
    const int64_t h = grid.step * i - grid.pad[0], w = grid.step * j - grid.pad[1];
    if (t >= end) {
      std::fill_n(to, edge * edge, outside);
    } else if (h >= 0 && h + edge <= image.height && w >= 0 && w + edge <= image.width) {
      E* row = image.at(n, h, w);
      for (int64_t a = 0; a < edge; ++a, row += image.width * image.channels)
        for (int64_t b = 0; b < edge; ++b) to[a * edge + b] = row + b * image.channels;
    } else {
      for (int64_t a = 0; a < edge; ++a)
        for (int64_t b = 0; b < edge; ++b) {
          const bool inside =
              h + a >= 0 && h + a < image.height && w + b >= 0 && w + b < image.width;
          to[a * edge + b] = inside ? image.at(n, h + a, w + b) : outside;
        }
    }
    if (++j < grid.columns) continue;
    j = 0;
    if (++i == grid.rows) i = 0, ++n;
  }
}

}  // namespace tessera::cpu
