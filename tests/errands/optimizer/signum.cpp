// Signum (Bernstein et al. 2018): p -= lr sign(m), where m keeps a share `beta` of itself and takes
// the rest from the gradient. It is made of ordinary ops, so it works on sharded parameters, and a
// compiled step fuses it.
#include "core/ops/pointwise.h"
#include "core/ops/update.h"
#include "core/optim/optimizer.h"
#include "dtensor/dtensor.h"

using namespace tessera;

class Signum final : public optim::Optimizer {
 public:
  Signum(optim::Params params, double lr, double beta)
      : Optimizer(std::move(params), lr, 0, {"momentum"}), beta_(beta) {}

 private:
  void update(const optim::Group& group, const Lists& l, const Tensor& scale) override {
    ReplicatePlain rates_are_the_same_on_every_rank;
    const Tensor factor = scale.defined() ? full_tensor(scale) : scale;
    auto set = [&](const Tensor& to, const Tensor& value) {
      assign_(to, l.if_finite ? where(isfinite(factor), value, to) : value);
    };
    for (size_t i = 0; i < l.params.size(); ++i) {
      const Tensor &p = l.params[i], &m = l.state[0][i];
      const Tensor g = factor.defined() ? l.grads[i] * cast(factor, p.dtype()) : l.grads[i];
      set(m, m * beta_ + g * (1 - beta_));
      set(p, p - cast(group.lr, p.dtype()) * sign(m));
    }
  }

  const double beta_;
};

std::unique_ptr<optim::Optimizer> signum(optim::Params params, double lr, double beta) {
  return std::make_unique<Signum>(std::move(params), lr, beta);
}
