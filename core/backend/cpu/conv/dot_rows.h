// bf16 convolutions and their gradients by the input, by dot instructions.
#pragma once
#include "core/backend/cpu/conv/nest.h"

namespace tessera::cpu {

/// True where it is faster than the library: bf16 on a CPU with dot instructions, two spatial dims,
/// one group, whole panels of channels (kernels/conv_dot_table.h). `role` is kOutput or kInput.
bool suits_conv_dot_rows(ConvRole role, const ConvAttributes::Window& window, const Meta& x,
                         const Meta& w, const Meta& y);
size_t conv_dot_rows_workspace(ConvRole role, const ConvAttributes::Window& window, const Meta& x,
                               const Meta& w, const Meta& y);
/// y from x and w, or dx from y and w; x and y are channels-last. `work` is scratch of the bytes
/// that the function above gives.
void run_conv_dot_rows(ConvRole role, const ConvAttributes::Window& window, const Tensor& x,
                       const Tensor& w, const Tensor& y, void* work);

}  // namespace tessera::cpu
