#include "core/optim/rmsprop.h"

#include "core/optim/update_each.h"

namespace tessera::optim {
namespace {

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

}  // namespace tessera::optim
