// Adam and AdamW, which call the multi-tensor update of core/ops/update.h, with PyTorch's options
// and defaults.
#pragma once
#include <array>

#include "core/optim/optimizer.h"

namespace tessera::optim {

struct AdamOptions {
  double lr = 1e-3;
  std::array<double, 2> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0;  // times the parameter, joins the gradient
};
/// Kingma, Ba 2015.
class Adam : public Optimizer {
 public:
  Adam(Params params, AdamOptions options = {}) : Adam(std::move(params), options, false) {}

 protected:
  Adam(Params params, AdamOptions options, bool decoupled);

 private:
  void update(const Group& group, const Lists& lists, const Tensor& scale) override;
  AdamOptions options_;
  bool decoupled_;
};

struct AdamWOptions {
  double lr = 1e-3;
  std::array<double, 2> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0.01;  // times lr times the parameter, apart from the gradient
};
/// Loshchilov, Hutter 2019.
class AdamW final : public Adam {
 public:
  AdamW(Params params, AdamWOptions o = {})
      : Adam(std::move(params), {o.lr, o.betas, o.eps, o.weight_decay}, true) {}
};

}  // namespace tessera::optim
