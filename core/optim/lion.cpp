#include "core/optim/lion.h"

#include "core/optim/update_each.h"

namespace tessera::optim {

Lion::Lion(Params params, LionOptions o)
    : Optimizer(std::move(params), o.lr, o.weight_decay, {"exp_avg"}), options_(o) {
  for (double beta : o.betas)
    TESSERA_CHECK(beta >= 0 && beta < 1, "lion: beta {} is not in [0, 1)", beta);
}

void Lion::update(const Group& group, const Lists& l, const Tensor& scale) {
  const double beta1 = options_.betas[0], beta2 = options_.betas[1];
  update_each("lion", l, scale, [&](size_t i, const Tensor& p, const Tensor& g) -> Tensors {
    const Tensor& m = l.state[0][i];
    const Tensor rate = cast(group.lr, p.dtype());
    const Tensor kept = group.weight_decay == 0 ? p : p * (1.0 - rate * group.weight_decay);
    return {kept - rate * sign(m * beta1 + g * (1 - beta1)), m * beta2 + g * (1 - beta2)};
  });
}

}  // namespace tessera::optim
