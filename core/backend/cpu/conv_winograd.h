// Convolutions of 3 x 3 by Winograd's minimal filtering.
#pragma once
#include "core/backend/cpu/conv_nest.h"
#include "core/dispatch/kernel.h"

namespace tessera::cpu {

/// True where it is faster than the library and than dot instructions: f32, and bf16 of images
/// that are not small, of two spatial dims, with kernels of 3 x 3 without strides or dilation, one
/// group and whole panels of channels (kernels/conv_winograd_table.h). Errors are of the size that
/// plain sums in f32 have, or in bf16 what rounding the result hides; where an operand is not
/// finite, all of a tile that sees it may be NaN.
bool suits_conv_winograd(const ConvAttributes::Window& window, const Meta& x, const Meta& w,
                         const Meta& y);
size_t conv_winograd_workspace(ConvRole role, const ConvAttributes::Window& window, const Meta& x,
                               const Meta& w, const Meta& y);
/// Activations are channels-last, a weight's gradient is row-major.
void run_conv_winograd(ConvRole role, const ConvAttributes::Window& window, const Tensor& x,
                       const Tensor& w, const Tensor& y, Workspace work);

/// The gradient by the weight, which run_conv_winograd runs.
size_t conv_winograd_weight_workspace(const Meta& w, const Meta& y);
void run_conv_winograd_weight(const ConvAttributes::Window& window, const Tensor& x,
                              const Tensor& dw, const Tensor& y, void* work);

}  // namespace tessera::cpu
