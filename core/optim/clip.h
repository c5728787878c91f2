// Clips gradients by their global norm without a pass over them: Optimizer::step takes the factor
// as its scale.
#pragma once
#include <span>

#include "core/tensor/tensor.h"

namespace tessera::optim {

struct ClipOptions {
  // Throw UserError when the norm is not finite; this reads the norm, so it waits for the device.
  bool error_if_nonfinite = false;
  double norm_type = 2;  // 2 or infinity
  // 0-d f64: the factor that makes the gradients as they are those of the loss. For a scaled loss
  // it is GradScaler::inverse_scale(); undefined: 1.
  Tensor grad_scale = {};
};

/// Norm of all gradients together (times grad_scale) before clipping, and min(1, max_norm / (norm +
/// 1e-6)) times grad_scale, both 0-d f64. A norm that is not finite gives a scale of 0 or NaN, as
/// in PyTorch.
struct [[nodiscard]] Clip {
  Tensor norm, scale;
  bool unscaled = false;  // grad_scale was given: both are of the loss, not of the scaled loss
};
/// auto clip = clip_grad_norm(model->parameters(), 1.0); opt.step(clip.scale);
/// A max_norm of infinity clips nothing.
Clip clip_grad_norm(std::span<const Tensor> params, double max_norm, ClipOptions options = {});

/// As PyTorch's: scales the gradients in place and returns their norm before (0-d f64).
Tensor clip_grad_norm_(std::span<const Tensor> params, double max_norm, ClipOptions options = {});

/// As PyTorch's: clamps every element of every gradient to [-value, value], in place.
void clip_grad_value_(std::span<const Tensor> params, double value);

}  // namespace tessera::optim
