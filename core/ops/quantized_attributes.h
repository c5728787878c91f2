// Attributes of ops on quantised tensors, as kernels read them. A quantised tensor is u8 and stands
// for scale (q - zero_point), which are attributes of the ops that read it. Weights are u8 with
// zero point 128: flipping the top bit makes them s8 with zero point 0, as kernels take them.
#pragma once
#include "core/ops/conv_attributes.h"
#include "core/ops/pool_attributes.h"

namespace tessera {

inline constexpr int kWeightZeroPoint = 128;

struct QuantizationParameters {
  double scale = 1;
  int zero_point = 0;  // 0..255: the u8 that stands for 0
  static void fields(auto& a, auto& f) { f("scale", a.scale), f.any("zero_point", a.zero_point); }
};

/// Operands x (u8), weight (u8), scale [O], bias [O], then the residual (u8) where there is one:
///   y = scale[o] sum((x - x_zero_point) (weight[o] - 128)) + bias[o]
///       + residual_scale (residual - residual_zero_point)
/// then relu; a result in u8 is round(y + y_zero_point) within 0..255, half to even, otherwise it
/// is f32. A window without spatial dims: x [.., K], weight [O, K] -> [.., O]; else those of a
/// convolution.
struct QuantizedLayerAttributes {
  struct Form {
    ConvAttributes::Window window = {};
    int x_zero_point = 0;
    bool residual = false;
    double residual_scale = 1;
    int residual_zero_point = 0;
    bool relu = false;
    bool quantized = true;  // the result
    int y_zero_point = 0;
    /// Weight, scale and bias change by assign_ alone, if at all: no op of a compiled graph
    /// computes them. A kernel may then pack the weights once for all calls of this op with them.
    bool constant = false;
    static void fields(auto& a, auto& f) {
      f.within(a.window), f.any("x_zero_point", a.x_zero_point);
      f("has_residual", a.residual), f("residual_scale", a.residual_scale);
      f.any("residual_zero_point", a.residual_zero_point), f("relu", a.relu);
      f("quantized", a.quantized), f.any("y_zero_point", a.y_zero_point);
      f("constant", a.constant);
    }
  };
  Form form;
  int spatial() const { return form.window.stride.size(); }
  static void fields(auto& a, auto& f) { f.within(a.form); }
};

}  // namespace tessera
