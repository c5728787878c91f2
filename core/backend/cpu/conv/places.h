// The gradient of a convolution by its weights as one matrix product for each place of the kernel.
#pragma once
#include "core/backend/cpu/conv/nest.h"
#include "core/dispatch/kernel.h"

namespace tessera::cpu {

/// True where it is faster than the library: f32, one group, kernels of several places that stride
/// or whose output is a few places wide.
bool suits_conv_places(const ConvAttributes::Window& window, const Meta& x, const Meta& w,
                       const Meta& y);
size_t conv_places_workspace(const ConvAttributes::Window& window, const Meta& x, const Meta& w,
                             const Meta& y);
/// dw from x and y, the gradient of the result, both channels-last.
void run_conv_places(const ConvAttributes::Window& window, const Tensor& x, const Tensor& dw,
                     const Tensor& y, Workspace work);

}  // namespace tessera::cpu
