// The host's side of random.cu, dropout.cu, arange.cu and update.cu: instances, and the places of a
// part of a random tensor. arange has one thread an element: cover(count, 256); updates have one
// block a piece.
#pragma once
#include <cstdint>

#include "core/backend/cuda/kernels/walk.h"
#include "core/tensor/dtype.h"

namespace tessera::cuda {

/// Entries random and packs. kind: rand, randn (floats), randint (integers; no packs).
Instance random_instance(std::string_view kind, DType dtype);
/// Entries dropout and packs.
Instance dropout_instance(DType dtype);
/// Entry `arange`.
Instance arange_instance(DType dtype);
/// Entries adam, sgd, sgd_momentum, row_squares, magnitudes, tree_sums, norm; f32 or f64.
Instance update_instance(DType dtype);

/// Elements of a pack that is drawn together; 1 where there are none.
int draw_width(std::string_view kind, DType dtype);
/// The places of a part, walked by packs of `width` elements (entry packs), or one by one where
/// width is 1.
struct DrawPlaces {
  int width;
  std::vector<WalkPiece> pieces;
};
/// Walks over a part of `extents` by the strides of the whole tensor, whose element `first` is the
/// part's first. Packs of `width` are aligned in the whole tensor. With `open`, a part that is
/// dense there may end within a pack.
DrawPlaces draw_places(std::span<const int64_t> extents, std::span<const int64_t> strides,
                       int64_t first, int width, bool open);
/// The launch that covers so many positions of a walk of that width.
Geometry draw_geometry(int64_t count, int width);

/// Elements of a piece of a parameter.
inline constexpr int64_t kUpdatePiece = 16384;
/// The pieces of tensors of so many elements.
std::vector<UpdatePiece> update_pieces(std::span<const int64_t> counts);

}  // namespace tessera::cuda
