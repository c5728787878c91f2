// Dynamic loss scaling, which f16 needs: its smallest number is 6e-8, and gradients below that
// would be zero. The loss is multiplied by a large number, the scale, and gradients are divided by
// it again where they are used, in f32. Where a gradient is infinite or NaN the scale was too
// large: that update is skipped and the scale halved. After many good steps it is doubled.
// Micikevicius et al. 2018, section 3.2; defaults and names are those of PyTorch's GradScaler.
//
//   optim::GradScaler scaler;
//   scaler.scale(loss).backward();
//   auto clip = optim::clip_grad_norm(params, 1.0, {.grad_scale = scaler.inverse_scale()});
//   scaler.step(opt, clip);  // or scaler.step(opt) without clipping
//   scaler.update();
//
// Invariant: the scale is a tensor and a step is skipped by a select, so a program reads nothing
// and a compiled step stays one graph; whether to skip follows from the norm of all gradients,
// which is the same on every rank, so all ranks decide alike.
#pragma once
#include "core/optim/clip.h"
#include "core/optim/optimizer.h"

namespace tessera::optim {

struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;  // good steps in a row before the scale grows
  bool enabled = true;             // false: everything passes unchanged, there is no state
};

class GradScaler {
 public:
  explicit GradScaler(GradScalerOptions options = {});
  GradScaler(const GradScaler&) = delete;
  GradScaler& operator=(const GradScaler&) = delete;

  bool enabled() const { return options_.enabled; }
  /// `loss` times the scale, for backward. A loss in f16 becomes f32, since it would overflow.
  Tensor scale(const Tensor& loss) const;
  /// 1 / scale, 0-d f64: for clip_grad_norm. Undefined when disabled.
  Tensor inverse_scale() const;
  /// Divides the gradients of `optimizer` by the scale in place, for code that looks at them before
  /// the step. It needs a pass over them; a clip with inverse_scale() does not. Throws UserError
  /// the second time in one step.
  void unscale_(Optimizer& optimizer);
  /// optimizer.step with gradients as of the unscaled loss; nothing changes when any is infinite or
  /// NaN. `clip` was computed with inverse_scale(), or after unscale_ (UserError if neither).
  void step(Optimizer& optimizer, const Clip& clip = {});
  /// Adapts the scale: call it once at the end of a step, after the steps of all optimizers. Throws
  /// UserError where no optimizer stepped.
  void update();

  /// The scale as a number; waits for the device. 1 when disabled.
  double current_scale() const;
  /// True when the last update() followed a skipped step; waits for the device.
  bool skipped() const;
  /// "scale" (0-d f32) and "good_steps" (0-d i64); empty when disabled.
  std::vector<NamedTensor> named_state() const;
  /// Throws UserError listing every missing, unexpected and mismatched name.
  void load_state(std::span<const NamedTensor> state);

 private:
  const GradScalerOptions options_;
  Tensor scale_, good_steps_;
  Tensor bad_;      // 0-d bool: an optimizer of the last step met a gradient that is not finite
  Tensor skipped_;  // 0-d bool: the step before the last update did
  std::vector<const Optimizer*> unscaled_;
  bool stepped_ = false;  // since the last update
};

}  // namespace tessera::optim
