// Convolutions of 3 x 3 by Winograd's minimal filtering (Lavin, Gray 2016): in f32 with 2.25 times
// fewer multiplications and the errors of plain sums; the gradient by a bf16 weight with 4 to 5
// times fewer, in f32.
#pragma once
#include "core/backend/cpu/conv/nest.h"

namespace tessera::cpu {

/// True where it is faster than the library and than dot instructions: f32, and the gradient by a
/// bf16 weight, with two spatial dims, kernels of 3 x 3 without strides or dilation, one group and
/// whole panels of channels (kernels/conv_winograd_table.h). For outputs and gradients by the input
/// the size of one image decides, not the number of images, so a sample's bits are the same in
/// every batch.
///
/// Errors of f32 are of the size that plain sums have, and an output that sees only zeros is 0. The
/// gradient by a bf16 weight has errors of the size of rounding, but for elements that nearly
/// cancel. Where an operand is not finite, all outputs of a tile that sees it may be Inf or NaN,
/// and so may all taps of a weight's gradient. Finite operands overflow earlier than in plain sums:
/// transformed values are up to 4 times the greatest of x, 2.25 times that of w and 4 times that of
/// y's gradient; for bf16, 100 times that of x and 225 times that of the gradient. Nothing
/// overflows where operands are below 1e36 and sums, over channels or tiles, of products of the
/// greatest in each are too; for bf16 these sums must be below 1e33.
bool suits_conv_winograd(ConvRole role, const ConvAttributes::Window& window, const Meta& x,
                         const Meta& w, const Meta& y);
size_t conv_winograd_workspace(ConvRole role, const ConvAttributes::Window& window, const Meta& x,
                               const Meta& w, const Meta& y);
/// Activations are channels-last, a weight's gradient is row-major. `work` is scratch of the bytes
/// that the function above gives on as many threads.
void run_conv_winograd(ConvRole role, const ConvAttributes::Window& window, const Tensor& x,
                       const Tensor& w, const Tensor& y, void* work);

/// The gradient by the weight, which the functions above call. True where there are tiles enough
/// and the scratch is not too much.
bool suits_conv_winograd_weight(const Meta& w, const Meta& y);
size_t conv_winograd_weight_workspace(const Meta& w, const Meta& y);
void run_conv_winograd_weight(const ConvAttributes::Window& window, const Tensor& x,
                              const Tensor& dw, const Tensor& y, void* work);

}  // namespace tessera::cpu
