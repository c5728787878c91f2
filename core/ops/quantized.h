// Ops on tensors of eight bits, for inference: an affine u8 tensor stands for scale (q -
// zero_point) (Jacob et al. 2018, arXiv:1712.05877). A scale is an argument of the op, not part of
// a tensor; compile/quantization chooses scales. None has a derivative: u8 results carry no
// history, and backward through a result in f32 throws NotDifferentiable.
#pragma once
#include "core/ops/quantized_attributes.h"
#include "core/primitive/registry.h"

namespace tessera {

/// round(x / scale) + zero_point within 0..255, half to even, NaN as 0; x floats -> u8.
Tensor quantize(const Tensor& x, const QuantizationParameters& q);
/// scale (x - zero_point); x u8 -> f32.
Tensor dequantize(const Tensor& x, const QuantizationParameters& q);

/// What is computed after the sum of a quantised layer, all in units of the result's scale.
struct QuantizedEpilogue {
  Tensor residual = {};  // u8, as the result
  double residual_scale = 1;
  int residual_zero_point = 0;
  bool relu = false;
  bool quantized = true;  // u8; false: f32, in units of 1
  int y_zero_point = 0;
  bool constant = false;  // see QuantizedLayerAttributes::Form
};
/// The formula of QuantizedLayerAttributes. x u8 [.., K], weight u8 [O, K] with zero point 128,
/// scale and bias floats [O] -> [.., O], u8 or f32. Sums are exact in i32; scale, bias and residual
/// are applied in f32. A CPU without dot instructions for bytes (VNNI) computes it by f32 kernels,
/// whose sums are exact below 2^24, and a warning says so once.
Tensor quantized_linear(const Tensor& x, int x_zero_point, const Tensor& weight,
                        const Tensor& scale, const Tensor& bias, const QuantizedEpilogue& then);
/// The same of a convolution: x [N, C, ..], weight [O, C / groups, K..] -> [N, O, ..]. Places in
/// the padding hold x_zero_point. Throws ShapeError for what does not fit.
Tensor quantized_conv(const Tensor& x, int x_zero_point, const Tensor& weight, const Tensor& scale,
                      const Tensor& bias, const ConvAttributes::Window& window,
                      const QuantizedEpilogue& then);
/// The largest value of each window; u8 [N, C, ..] -> u8 [N, C, windows..]. Not for adaptive
/// windows.
Tensor quantized_max_pool(const Tensor& x, const PoolAttributes::Windows& windows);

void register_quantized_ops(OpRegistry& registry);

}  // namespace tessera
