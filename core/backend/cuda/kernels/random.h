// The host's side of random.cu, dropout.cu, arange.cu and update.cu: instances. Random kernels,
// dropout and arange have one thread an element: cover(count, 256); updates one block a piece.
#pragma once
#include <cstdint>

#include "core/backend/cuda/kernels/walk.h"
#include "core/tensor/dtype.h"

namespace tessera::cuda {

/// Entry `random`. kind: rand, randn (floats), randint (integers).
Instance random_instance(std::string_view kind, DType dtype);
/// Entry `dropout`.
Instance dropout_instance(DType dtype);
/// Entry `arange`.
Instance arange_instance(DType dtype);
/// Entries adam, sgd, sgd_momentum, row_squares, magnitudes, tree_sums, norm; f32 or f64.
Instance update_instance(DType dtype);

/// Elements of a piece of a parameter.
inline constexpr int64_t kUpdatePiece = 16384;
/// The pieces of tensors of so many elements.
std::vector<UpdatePiece> update_pieces(std::span<const int64_t> counts);

}  // namespace tessera::cuda
