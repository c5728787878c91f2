// The gradient of a bf16 convolution by its weights, by dot instructions.
#pragma once
#include "core/backend/cpu/conv/nest.h"

namespace tessera::cpu {

/// True where it is faster than the library: bf16 on a CPU with dot instructions, two spatial dims,
/// one group, an even number of images, whole panels of channels (kernels/conv_dot_table.h).
bool suits_conv_dot_weight(const ConvAttributes::Window& window, const Meta& x, const Meta& w,
                           const Meta& y);
size_t conv_dot_weight_workspace(const ConvAttributes::Window& window, const Meta& x, const Meta& w,
                                 const Meta& y);
/// dw from x and y, the gradient of the result, both channels-last. `work` is scratch of the bytes
/// that the function above gives on as many threads.
void run_conv_dot_weight(const ConvAttributes::Window& window, const Tensor& x, const Tensor& dw,
                         const Tensor& y, void* work);

}  // namespace tessera::cpu
