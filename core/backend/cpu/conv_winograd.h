// f32 convolutions of 3 x 3 by Winograd's minimal filtering.
#pragma once
#include "core/backend/cpu/conv_nest.h"
#include "core/dispatch/kernel.h"

namespace tessera::cpu {

/// True where it is faster than the library: f32, two spatial dims, kernels of 3 x 3 without
/// strides or dilation, one group, whole panels of channels (kernels/conv_winograd_table.h). Its
/// transforms hold numbers up to four times the operands', so errors are of the size that
/// summing plainly has; where an operand is not finite, the whole tile that sees it may be NaN.
bool suits_conv_winograd(const ConvAttributes::Window& window, const Meta& x, const Meta& w,
                         const Meta& y);
size_t conv_winograd_workspace(ConvRole role, const ConvAttributes::Window& window, const Meta& x,
                               const Meta& w, const Meta& y);
/// Activations are channels-last, a weight's gradient is row-major.
void run_conv_winograd(ConvRole role, const ConvAttributes::Window& window, const Tensor& x,
                       const Tensor& w, const Tensor& y, Workspace work);

}  // namespace tessera::cpu
