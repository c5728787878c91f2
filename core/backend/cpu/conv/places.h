// The gradient of a convolution by its weights as one matrix product for each place of the kernel.
#pragma once
#include "core/backend/cpu/conv/nest.h"
#include "core/backend/cpu/gemm.h"

namespace tessera::cpu {

/// True where it is faster than the library: f32, one group, kernels of several places, with
/// strides or with an output that is a few places wide.
bool suits_conv_places(const ConvAttributes::Window& window, const Meta& x, const Meta& w,
                       const Meta& y);
/// The product of one place.
PlannedGemm plan_conv_places(const Meta& w, const Meta& y);
size_t conv_places_workspace(const PlannedGemm& product, const Meta& w, const Meta& y);
/// dw from x and y, the gradient of the result, both channels-last. `work` is scratch of
/// conv_places_workspace() bytes.
void run_conv_places(const ConvAttributes::Window& window, const PlannedGemm& product,
                     const Tensor& x, const Tensor& dw, const Tensor& y, void* work);

}  // namespace tessera::cpu
