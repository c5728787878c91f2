// The update of optimizers that are made of ordinary ops. An eager step makes some passes over each
// parameter; a compiled step fuses them.
#pragma once
#include "core/dispatch/context.h"
#include "core/dispatch/sharding.h"
#include "core/ops/pointwise.h"
#include "core/ops/update.h"
#include "core/optim/optimizer.h"

namespace tessera::optim {

/// Assigns to each parameter and its state what f(i, parameter, gradient) returns: the next value
/// of the parameter first, then those of its state in the order of Lists::state. Gradients are
/// multiplied by `scale` before, where it is defined. Throws UserError, which names `op`, for
/// parameters that are neither f32 nor f64: in f16 an eps of 1e-8 is 0.
template <class Lists, class F>
void update_each(const char* op, const Lists& l, const Tensor& scale, F f) {
  for (const Tensor& p : l.params)
    TESSERA_CHECK(p.dtype() == kF32 || p.dtype() == kF64,
                  "{}: parameters must be f32 or f64, got {}; keep f32 master weights", op,
                  describe(p));
  Scoped<bool> same(context().replicate_plain,
                    true);  // rates and scales are the same on every rank
  const ShardingLayer* sharding = scale.defined() ? sharding_of(scale) : nullptr;
  const Tensor factor = sharding ? sharding->whole_value() : scale;
  for (size_t i = 0; i < l.params.size(); ++i) {
    const Tensor& p = l.params[i];
    const Tensors next =
        f(i, p, factor.defined() ? l.grads[i] * cast(factor, p.dtype()) : l.grads[i]);
    for (size_t k = 0; k < next.size(); ++k) {
      const Tensor& to = k == 0 ? p : l.state[k - 1][i];
      assign_(to, l.if_finite ? where(isfinite(factor), next[k], to) : next[k]);
    }
  }
}

/// The gradient with the decay that joins it.
inline Tensor decayed(const Tensor& g, const Tensor& p, double weight_decay) {
  return weight_decay == 0 ? g : g + p * weight_decay;
}

}  // namespace tessera::optim
