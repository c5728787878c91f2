#include "core/optim/elementwise.h"

#include "core/dispatch/sharding.h"
#include "core/ops/pointwise.h"
#include "core/ops/update.h"

namespace tessera::optim {
namespace {

// Each parameter and its state take what f(i, parameter, gradient) returns of them: the parameter,
// then the state by kind.
template <class Lists, class F>
void update_each(const char* op, const Lists& l, const Tensor& scale, F f) {
  for (const Tensor& p : l.params)  // in f16 an eps of 1e-8 is 0
    TESSERA_CHECK(p.dtype() == kF32 || p.dtype() == kF64,
                  "{}: parameters must be f32 or f64, got {}; keep f32 master weights", op,
                  describe(p));
  Scoped<bool> same(context().replicate_plain, true);  // rates and scales are, on every rank
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

Tensor decayed(const Tensor& g, const Tensor& p, double weight_decay) {
  return weight_decay == 0 ? g : g + p * weight_decay;
}

std::vector<std::string> kinds_of(const RMSpropOptions& o) {
  std::vector<std::string> kinds{"square_avg"};
  if (o.momentum != 0) kinds.push_back("momentum_buffer");
  if (o.centered) kinds.push_back("grad_avg");
  return kinds;
}

}  // namespace

RMSprop::RMSprop(Params params, RMSpropOptions o)
    : Optimizer(std::move(params), o.lr, o.weight_decay, kinds_of(o)), options_(o) {
  TESSERA_CHECK(o.alpha >= 0 && o.alpha < 1, "rmsprop: alpha {} is not in [0, 1)", o.alpha);
  TESSERA_CHECK(o.eps >= 0 && o.momentum >= 0, "rmsprop: eps {}, momentum {}; expected 0 or more",
                o.eps, o.momentum);
}

void RMSprop::update(const Group& group, const Lists& l, const Tensor& scale) {
  const RMSpropOptions& o = options_;
  update_each("rmsprop", l, scale, [&](size_t i, const Tensor& p, Tensor g) -> Tensors {
    g = decayed(g, p, group.weight_decay);
    const Tensor squares = l.state[0][i] * o.alpha + g * g * (1 - o.alpha);
    Tensor mean, size = squares;
    if (o.centered) {
      mean = l.state.back()[i] * o.alpha + g * (1 - o.alpha);
      size = maximum(squares - mean * mean, 0.0);  // rounding may leave less
    }
    Tensor by = g / (sqrt(size) + o.eps);
    Tensors next{Tensor(), squares};
    if (o.momentum != 0) next.push_back(by = l.state[1][i] * o.momentum + by);
    if (o.centered) next.push_back(mean);
    next[0] = p - cast(group.lr, p.dtype()) * by;
    return next;
  });
}

Adagrad::Adagrad(Params params, AdagradOptions o)
    : Optimizer(std::move(params), o.lr, o.weight_decay, {"sum"}), options_(o) {
  TESSERA_CHECK(o.lr_decay >= 0 && o.eps >= 0, "adagrad: lr_decay {}, eps {}; expected 0 or more",
                o.lr_decay, o.eps);
}

void Adagrad::update(const Group& group, const Lists& l, const Tensor& scale) {
  const Tensor rate = options_.lr_decay == 0
                          ? group.lr
                          : group.lr / ((step_count() - 1.0) * options_.lr_decay + 1.0);
  update_each("adagrad", l, scale, [&](size_t i, const Tensor& p, Tensor g) -> Tensors {
    g = decayed(g, p, group.weight_decay);
    const Tensor squares = l.state[0][i] + g * g;
    return {p - cast(rate, p.dtype()) * g / (sqrt(squares) + options_.eps), squares};
  });
}

Lion::Lion(Params params, LionOptions o)
    : Optimizer(std::move(params), o.lr, o.weight_decay, {"exp_avg"}), options_(o) {
  for (double beta : o.betas)
    TESSERA_CHECK(beta >= 0 && beta < 1, "lion: beta {} is not in [0, 1)", beta);
}

void Lion::update(const Group& group, const Lists& l, const Tensor& scale) {
  const auto [beta1, beta2] = options_.betas;
  update_each("lion", l, scale, [&](size_t i, const Tensor& p, const Tensor& g) -> Tensors {
    const Tensor& m = l.state[0][i];
    const Tensor rate = cast(group.lr, p.dtype());
    const Tensor kept = group.weight_decay == 0 ? p : p * (1.0 - rate * group.weight_decay);
    return {kept - rate * sign(m * beta1 + g * (1 - beta1)), m * beta2 + g * (1 - beta2)};
  });
}

}  // namespace tessera::optim
