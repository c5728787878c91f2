#include "core/optim/adagrad.h"

#include "core/optim/update_each.h"

namespace tessera::optim {

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

}  // namespace tessera::optim
