// Attributes of ops on quantised tensors, as kernels read them. A quantised tensor is u8 and stands
// for scale (q - zero_point); scale and zero point are attributes of the ops that read it. Weights
// are u8 too, their zero point is 128: what kernels for s8 take once the top bit is turned over.
#pragma once
#include <memory>
#include <mutex>
#include <string>

#include "core/ops/conv_attributes.h"
#include "core/ops/pool_attributes.h"

namespace tessera {

inline constexpr int kWeightZeroPoint = 128;

struct QuantizeAttributes : Primitive {
  QuantizeAttributes(const OpInfo& op, double scale, int zero_point)
      : Primitive(op), scale(scale), zero_point(zero_point) {}
  const double scale;
  const int zero_point;
};

/// What a kernel made of the constant operands of one op: packed weights, generated code.
struct PreparedLayer {
  virtual ~PreparedLayer() = default;
  /// The library's name of the code that runs: "brgconv:avx512_core_vnni".
  virtual std::string kernel() const = 0;
};

/// Operands x (u8), weight (u8), scale [O], bias [O], then the residual (u8) where there is one:
///   y = scale[o] sum((x - x_zero_point) (weight[o] - 128)) + bias[o]
///       + residual_scale (residual - residual_zero_point)
/// then relu; a result in u8 is round(y + y_zero_point) within 0..255, half to even, otherwise it
/// is f32. A window without spatial dims: x [.., K], weight [O, K] -> [.., O]; else those of a
/// convolution.
struct QuantizedLayerAttributes : Primitive {
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
    /// computes them. Then a kernel may pack weights once for all calls of this op with them.
    bool constant = false;
  };
  QuantizedLayerAttributes(const OpInfo& op, const Form& form) : Primitive(op), form(form) {}
  int spatial() const { return form.window.stride.size(); }
  const Form form;

  /// Kept by the kernel between calls and freed with the op. It shows in no result.
  std::shared_ptr<const PreparedLayer> prepared() const {
    std::lock_guard lock(mutex_);
    return prepared_;
  }
  void keep(std::shared_ptr<const PreparedLayer> prepared) const {
    std::lock_guard lock(mutex_);
    prepared_ = std::move(prepared);
  }

 private:
  mutable std::mutex mutex_;
  mutable std::shared_ptr<const PreparedLayer> prepared_;
};

}  // namespace tessera
