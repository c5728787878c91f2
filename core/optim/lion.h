// Lion, made of ordinary ops (update_each.h), with PyTorch's options and defaults.
#pragma once
#include <array>

#include "core/optim/optimizer.h"

namespace tessera::optim {

struct LionOptions {
  double lr = 1e-4;
  std::array<double, 2> betas = {0.9, 0.99};
  double weight_decay = 0;  // times lr times the parameter, apart from the gradient
};
/// Chen et al. 2023, "Symbolic discovery of optimization algorithms", algorithm 2.
class Lion final : public Optimizer {
 public:
  Lion(Params params, LionOptions options = {});

 private:
  void update(const Group& group, const Lists& lists, const Tensor& scale) override;
  LionOptions options_;
};

}  // namespace tessera::optim
