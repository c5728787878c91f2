// Stochastic gradient descent with momentum, which calls the multi-tensor update of
// core/ops/update.h, with PyTorch's options and defaults.
#pragma once
#include "core/optim/optimizer.h"

namespace tessera::optim {

struct SGDOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;     // the gradient enters the momentum times 1 - dampening
  double weight_decay = 0;  // times the parameter, joins the gradient
  bool nesterov = false;    // Sutskever et al. 2013
};
class SGD final : public Optimizer {
 public:
  SGD(Params params, SGDOptions options = {});

 private:
  void update(const Group& group, const Lists& lists, const Tensor& scale) override;
  void notice_loading();
  SGDOptions options_;
  // With dampening only: parameters that have a momentum since the latest step or earlier.
  std::vector<const TensorImpl*> started_;
  double last_step_ = 0;
};

}  // namespace tessera::optim
