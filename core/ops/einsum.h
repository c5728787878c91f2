// Einstein's summation over any number of operands, in NumPy's and PyTorch's notation.
#pragma once
#include <span>
#include <string_view>

#include "core/tensor/tensor.h"

namespace tessera {

/// einsum("bij,bjk->bik", a, b): each letter (a-z, A-Z) names a dim, letters missing from the
/// result are summed, spaces are ignored.
/// - "..." stands for the dims that an operand has beyond its letters; aligned to the right, they
///   broadcast. They may be summed by leaving "..." out of the result.
/// - A letter that an operand repeats walks its diagonal: "ii->i".
/// - Without "->" the result has "..." and then, in alphabetical order, letters that appear once.
/// - An extent of 1 meets any other extent of its letter.
/// Operands are contracted from left to right. Throws UserError for a spec that cannot be read and
/// ShapeError where operands do not fit it.
Tensor einsum(std::string_view spec, std::span<const Tensor> operands);

template <class... T>
Tensor einsum(std::string_view spec, const Tensor& first, const T&... others) {
  const Tensor operands[] = {first, others...};
  return einsum(spec, std::span<const Tensor>(operands));
}

}  // namespace tessera
