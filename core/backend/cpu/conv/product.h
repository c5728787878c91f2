// Convolutions with kernels of one place, which are matrix products of rows of channels.
#pragma once
#include "core/backend/cpu/conv/nest.h"
#include "core/backend/cpu/gemm.h"

namespace tessera::cpu {

/// True where it is computed as a product: with one group and no padding, at extents where the
/// product is faster than the library's convolution (f32; by 7 to 17 % over ResNet-50's, on a core
/// of Zen 4) or than ours (the gradient by a bf16 weight), and where the library computes a
/// gradient wrongly (by an f32 weight with strides, where x has few channels).
bool is_conv_product(ConvRole role, const ConvAttributes::Window& window, const Meta& x,
                     const Meta& w, const Meta& y);
PlannedGemm plan_conv_product(ConvRole role, const Meta& x, const Meta& w, const Meta& y);
/// Activations that are results lie channels-last. `work` is scratch of the product's
/// workspace_bytes().
void run_conv_product(ConvRole role, const ConvAttributes::Window& window,
                      const PlannedGemm& product, const Tensor& x, const Tensor& w, const Tensor& y,
                      void* work);

}  // namespace tessera::cpu
