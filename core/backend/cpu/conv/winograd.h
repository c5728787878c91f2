// Convolutions of 3 x 3 by Winograd's minimal filtering (Lavin, Gray 2016).
#pragma once
#include "core/backend/cpu/conv/nest.h"

namespace tessera::cpu {

/// True where it is faster than the library and than dot instructions, of two spatial dims, with
/// kernels of 3 x 3 without strides or dilation, one group and whole panels of channels
/// (kernels/conv_winograd_table.h): f32, and of bf16 the gradient by the weight. Of outputs and
/// gradients by the input an image decides, not how many there are: a sample's bits are the same
/// in every batch.
///
/// Errors of f32 are of the size that plain sums have, and an output that sees only zeros is 0.
/// The gradient by a bf16 weight errs as rounding does, but where it nearly cancels. Where an
/// operand is not finite, all outputs of a tile that sees it may be Inf or NaN, and all taps of a
/// weight's gradient. Finite operands overflow earlier than in plain sums, for transformed values
/// are up to 4 times the greatest of x, 2.25 times that of w, 4 times that of y's gradient; of bf16
/// 100 times (x) and 225 times (the gradient). Nothing overflows where operands are below 1e36 and
/// so are sums, over channels or tiles, of products of the greatest in each; for bf16 sums below
/// 1e33.
bool suits_conv_winograd(ConvRole role, const ConvAttributes::Window& window, const Meta& x,
                         const Meta& w, const Meta& y);
size_t conv_winograd_workspace(ConvRole role, const ConvAttributes::Window& window, const Meta& x,
                               const Meta& w, const Meta& y);
/// Activations are channels-last, a weight's gradient is row-major. `work` is scratch of the bytes
/// that the function above gives on as many threads.
void run_conv_winograd(ConvRole role, const ConvAttributes::Window& window, const Tensor& x,
                       const Tensor& w, const Tensor& y, void* work);

/// The gradient by the weight, for the functions above: whether there are tiles enough, and scratch
/// is not too much.
bool suits_conv_winograd_weight(const Meta& w, const Meta& y);
size_t conv_winograd_weight_workspace(const Meta& w, const Meta& y);
void run_conv_winograd_weight(const ConvAttributes::Window& window, const Tensor& x,
                              const Tensor& dw, const Tensor& y, void* work);

}  // namespace tessera::cpu
