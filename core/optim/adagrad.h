// Adagrad, made of ordinary ops (update_each.h), with PyTorch's options and defaults.
#pragma once
#include "core/optim/optimizer.h"

namespace tessera::optim {

struct AdagradOptions {
  double lr = 1e-2;
  double lr_decay = 0;      // the rate of step n is lr / (1 + (n - 1) lr_decay)
  double weight_decay = 0;  // times the parameter, joins the gradient
  double eps = 1e-10;
};
/// Duchi, Hazan, Singer 2011. Sums of squares begin at 0.
class Adagrad final : public Optimizer {
 public:
  Adagrad(Params params, AdagradOptions options = {});

 private:
  void update(const Group& group, const Lists& lists, const Tensor& scale) override;
  AdagradOptions options_;
};

}  // namespace tessera::optim
