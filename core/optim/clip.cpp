#include "core/optim/clip.h"

#include <cmath>
#include <vector>

#include "core/autograd/autograd.h"
#include "core/dispatch/context.h"
#include "core/ops/pointwise.h"
#include "core/ops/update.h"

namespace tessera::optim {
namespace {

std::vector<Tensor> gradients_of(std::span<const Tensor> params) {
  std::vector<Tensor> grads;
  for (const Tensor& p : params)
    if (Tensor g = p.grad(); g.defined()) grads.push_back(std::move(g));
  return grads;
}

Tensor norm_of(const std::vector<Tensor>& grads, double type) {
  if (grads.empty()) return scalar_tensor(0.0, kF64);
  if (type == 2) return global_norm(grads).to(kF64);
  TESSERA_CHECK(type == std::numeric_limits<double>::infinity(),
                "clip_grad_norm: norm_type {} is neither 2 nor infinity", type);
  return max_magnitude(grads);
}

}  // namespace

Clip clip_grad_norm(std::span<const Tensor> params, double max_norm, ClipOptions options) {
  TESSERA_CHECK(max_norm > 0, "clip_grad_norm: max_norm {} is not positive", max_norm);
  NoGrad off;
  Scoped<Phase> phase(context().phase, Phase::kUpdate);
  Tensor norm = norm_of(gradients_of(params), options.norm_type);
  const bool unscaled = options.grad_scale.defined();
  const Tensor grad_scale = unscaled ? options.grad_scale.to(norm.device()) : Tensor();
  if (unscaled) norm = norm * grad_scale;
  if (options.error_if_nonfinite) {
    double value = norm.item<double>();
    TESSERA_CHECK(std::isfinite(value),
                  "clip_grad_norm: the norm of the gradients is {}; look for a NaN or a too large "
                  "learning rate",
                  value);
  }
  Tensor scale = minimum(max_norm / (norm + 1e-6), 1.0);
  if (unscaled) scale = scale * grad_scale;
  return {norm, scale, unscaled};
}

Tensor clip_grad_norm_(std::span<const Tensor> params, double max_norm, ClipOptions options) {
  Clip clip = clip_grad_norm(params, max_norm, options);
  NoGrad off;
  Scoped<Phase> phase(context().phase, Phase::kUpdate);
  for (const Tensor& g : gradients_of(params)) assign_(g, g * clip.scale);
  return clip.norm;
}

void clip_grad_value_(std::span<const Tensor> params, double value) {
  TESSERA_CHECK(value > 0, "clip_grad_value_: {} is not positive", value);
  NoGrad off;
  Scoped<Phase> phase(context().phase, Phase::kUpdate);
  for (const Tensor& g : gradients_of(params)) clamp_(g, -value, value);
}

}  // namespace tessera::optim
