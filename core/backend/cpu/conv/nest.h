// The loop nest of convolutions, for what no library computes.
#pragma once
#include "core/ops/conv_attributes.h"
#include "core/tensor/tensor.h"

namespace tessera::cpu {

/// Which operand of the family is the result (conv_attributes.h).
enum class ConvRole : uint8_t { kOutput, kInput, kWeight };

/// f32 or f64, any strides; the result is dense. Each element is summed in one fixed order.
void run_conv_nest(ConvRole role, const ConvAttributes::Window& window, const Tensor& x,
                   const Tensor& w, const Tensor& y);

}  // namespace tessera::cpu
