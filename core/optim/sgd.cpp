#include "core/optim/sgd.h"

#include <algorithm>
#include <cmath>

#include "core/ops/update.h"

namespace tessera::optim {

SGD::SGD(Params params, SGDOptions o)
    : Optimizer(std::move(params), o.lr, o.weight_decay,
                o.momentum != 0 ? std::vector<std::string>{"momentum_buffer"}
                                : std::vector<std::string>{}),
      options_(o) {
  TESSERA_CHECK(o.momentum >= 0, "sgd: momentum {}; expected 0 or more", o.momentum);
  TESSERA_CHECK(std::isfinite(o.dampening), "sgd: dampening {}; expected a finite number",
                o.dampening);
  TESSERA_CHECK(!o.nesterov || (o.momentum > 0 && o.dampening == 0),
                "sgd: nesterov needs momentum (got {}) and no dampening (got {})", o.momentum,
                o.dampening);
}

void SGD::update(const Group& group, const Lists& l, const Tensor& scale) {
  SgdUpdate o{.momentum = options_.momentum,
              .dampening = options_.dampening,
              .weight_decay = group.weight_decay,
              .nesterov = options_.nesterov,
              .if_finite = l.if_finite};
  if (options_.momentum == 0) return sgd_update_(l.params, l.grads, {}, group.lr, scale, o);
  // The first gradient of a parameter enters its momentum whole. With buffers of zeros that differs
  // from later steps only where there is dampening.
  if (options_.dampening == 0)
    return sgd_update_(l.params, l.grads, l.state[0], group.lr, scale, o);
  TESSERA_CHECK(!l.if_finite,
                "sgd: dampening {} makes the first step of a momentum another one, which a step "
                "that may be skipped (step_if_finite, GradScaler) cannot count; train without "
                "dampening",
                options_.dampening);
  notice_loading();
  for (bool first : {true, false}) {
    std::vector<Tensor> params, grads, buffers;
    for (size_t i = 0; i < l.params.size(); ++i) {
      if (std::ranges::binary_search(started_, l.params[i].impl()) == first) continue;
      params.push_back(l.params[i]), grads.push_back(l.grads[i]), buffers.push_back(l.state[0][i]);
    }
    o.first = first;
    if (!params.empty()) sgd_update_(params, grads, buffers, group.lr, scale, o);
  }
  for (const Tensor& p : l.params) started_.push_back(p.impl());
  std::ranges::sort(started_);
  started_.erase(std::unique(started_.begin(), started_.end()), started_.end());
}

// State may have been loaded in place, which only the step count shows: momentum that was loaded
// has begun. The count is read, so a compiled step runs this at every call.
void SGD::notice_loading() {
  const double step = step_count().item<double>();
  if (step != last_step_ && step != last_step_ + 1) {
    started_.clear();
    if (step > 1)
      for (const Tensor& p : parameters()) started_.push_back(p.impl());
    std::ranges::sort(started_);
  }
  last_step_ = step;
}

}  // namespace tessera::optim
