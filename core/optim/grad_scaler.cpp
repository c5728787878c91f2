#include "core/optim/grad_scaler.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/autograd/autograd.h"
#include "core/dispatch/context.h"
#include "core/dispatch/default_device.h"
#include "core/dispatch/sharding.h"
#include "core/ops/compose.h"
#include "core/ops/create.h"
#include "core/ops/pointwise.h"
#include "core/ops/update.h"

namespace tessera::optim {
namespace {

constexpr double kNone = std::numeric_limits<double>::infinity();  // clips nothing

// The value of a number that is the same on all ranks, as a plain tensor.
Tensor plain(const Tensor& number) {
  const ShardingLayer* sharding = sharding_of(number);
  return sharding ? sharding->whole_value() : number;
}

}  // namespace

GradScaler::GradScaler(GradScalerOptions o) : options_(o) {
  TESSERA_CHECK(o.init_scale > 0 && std::isfinite(o.init_scale),
                "grad_scaler: init_scale {} is not positive and finite", o.init_scale);
  TESSERA_CHECK(o.growth_factor > 1, "grad_scaler: growth_factor {} is not above 1",
                o.growth_factor);
  TESSERA_CHECK(o.backoff_factor > 0 && o.backoff_factor < 1,
                "grad_scaler: backoff_factor {} is not between 0 and 1", o.backoff_factor);
  TESSERA_CHECK(o.growth_interval > 0, "grad_scaler: growth_interval {} is not positive",
                o.growth_interval);
  if (!o.enabled) return;
  const Device device = default_device();
  scale_ = scalar_tensor(o.init_scale, kF32, device);
  good_steps_ = scalar_tensor(0, kI64, device);
  bad_ = scalar_tensor(false, kBool, device);
  skipped_ = scalar_tensor(false, kBool, device);
}

Tensor GradScaler::scale(const Tensor& loss) const {
  if (!enabled()) return loss;
  Tensor wide = size_of(loss.dtype()) < 4 ? cast(loss, kF32) : loss;
  return wide * cast(scale_, wide.dtype());
}

Tensor GradScaler::inverse_scale() const {
  if (!enabled()) return {};
  NoGrad off;
  Scoped<Phase> phase(context().phase, Phase::kUpdate);
  return 1.0 / cast(scale_, kF64);
}

void GradScaler::unscale_(Optimizer& optimizer) {
  if (!enabled()) return;
  TESSERA_CHECK(std::ranges::find(unscaled_, &optimizer) == unscaled_.end(),
                "grad_scaler: unscale_ was called twice for one optimizer; call update() at the "
                "end of each step");
  Tensor inverse = inverse_scale();
  NoGrad off;
  Scoped<Phase> phase(context().phase, Phase::kUpdate);
  for (const Tensor& p : optimizer.parameters())
    if (Tensor g = p.grad(); g.defined()) {
      inverse = inverse.to(g.device());
      // 1 / scale may be nothing in f16.
      Tensor wide = size_of(g.dtype()) < 4 ? cast(g, kF32) : g;
      assign_(g, cast(wide * cast(inverse, wide.dtype()), g.dtype()));
    }
  unscaled_.push_back(&optimizer);
}

void GradScaler::step(Optimizer& optimizer, const Clip& given) {
  if (!enabled()) return optimizer.step(given.scale);
  const bool unscaled = std::ranges::find(unscaled_, &optimizer) != unscaled_.end();
  TESSERA_CHECK(
      !given.norm.defined() || unscaled != given.unscaled,
      "grad_scaler: the norm given to step is {}; compute it once, either with "
      "{{.grad_scale = scaler.inverse_scale()}} or after unscale_",
      unscaled ? "scaled back although unscale_ did that already" : "that of the scaled loss");
  Clip clip = given;
  if (!clip.norm.defined())
    clip = clip_grad_norm(optimizer.parameters(), kNone,
                          {.grad_scale = unscaled ? Tensor() : inverse_scale()});
  NoGrad off;
  Scoped<Phase> phase(context().phase, Phase::kUpdate);
  Tensor finite = isfinite(clip.norm);
  optimizer.step_if_finite(
      where(finite, clip.scale, scalar_tensor(std::numeric_limits<double>::quiet_NaN(), kF64)));
  const Tensor bad = logical_not(plain(finite));
  assign_(bad_, stepped_ ? logical_or(bad_, bad) : bad);
  stepped_ = true;
}

void GradScaler::update() {
  unscaled_.clear();
  if (!enabled()) return;
  TESSERA_CHECK(stepped_, "grad_scaler: update() without a step; call step(optimizer) before it");
  stepped_ = false;
  NoGrad off;
  Scoped<Phase> phase(context().phase, Phase::kUpdate);
  Tensor good = good_steps_ + 1, due = ge(good, options_.growth_interval);
  Tensor grown = scale_ * options_.growth_factor;
  grown = where(isfinite(grown), grown, scale_);
  // Below the smallest normal number a scale has no inverse.
  Tensor shrunk =
      clamp_min(scale_ * options_.backoff_factor, double(std::numeric_limits<float>::min()));
  Tensor scale = where(bad_, shrunk, where(due, grown, scale_));
  Tensor none = scalar_tensor(0, kI64);
  assign_(good_steps_, where(logical_or(bad_, due), none, good));
  assign_(scale_, scale);
  assign_(skipped_, bad_);
}

double GradScaler::current_scale() const { return enabled() ? scale_.item<float>() : 1; }
bool GradScaler::skipped() const { return enabled() && skipped_.item<bool>(); }

std::vector<NamedTensor> GradScaler::named_state() const {
  if (!enabled()) return {};
  return {{"scale", scale_}, {"good_steps", good_steps_}};
}

void GradScaler::load_state(std::span<const NamedTensor> state) {
  StateMisfit misfit;
  std::vector<NamedTensor> own = named_state();
  for (const NamedTensor& t : state) {
    auto it = std::ranges::find(own, t.name, &NamedTensor::name);
    if (it == own.end())
      misfit.unexpected.push_back(t.name);
    else
      misfit.compare(t.name, it->tensor, t.tensor);
  }
  for (const NamedTensor& t : own)
    if (std::ranges::find(state, t.name, &NamedTensor::name) == state.end())
      misfit.missing.push_back(t.name);
  misfit.check("the grad scaler");
  for (const NamedTensor& t : state)
    assign_(std::ranges::find(own, t.name, &NamedTensor::name)->tensor, t.tensor);
}

}  // namespace tessera::optim
