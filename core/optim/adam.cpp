#include "core/optim/adam.h"

#include "core/ops/update.h"

namespace tessera::optim {

Adam::Adam(Params params, AdamOptions o, bool decoupled)
    : Optimizer(std::move(params), o.lr, o.weight_decay, {"exp_avg", "exp_avg_sq"}),
      options_(o),
      decoupled_(decoupled) {
  for (double beta : o.betas)
    TESSERA_CHECK(beta >= 0 && beta < 1, "adam: beta {} is not in [0, 1)", beta);
  TESSERA_CHECK(o.eps >= 0, "adam: eps {}; expected 0 or more", o.eps);
}

void Adam::update(const Group& group, const Lists& l, const Tensor& scale) {
  adam_update_(l.params, l.grads, l.state[0], l.state[1], group.lr, step_count(), scale,
               {.beta1 = options_.betas[0],
                .beta2 = options_.betas[1],
                .eps = options_.eps,
                .weight_decay = group.weight_decay,
                .decoupled = decoupled_,
                .if_finite = l.if_finite});
}

}  // namespace tessera::optim
