// What vendors publish of their cards.
#pragma once
#include <optional>
#include <string_view>

#include "core/tensor/dtype.h"

namespace tessera::bench {

/// The dense peak of products of `dtype` with sums in f32, in FLOP/s, of the card that
/// `description` names: f32 without TF32, 16-bit floats without sparsity. Nothing for a card that
/// is not in the table, for a part of one (MIG), and for other dtypes.
std::optional<double> published_product_peak(std::string_view description, DType dtype);

}  // namespace tessera::bench
