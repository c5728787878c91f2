// RMSprop, made of ordinary ops (update_each.h), with PyTorch's options and defaults.
#pragma once
#include "core/optim/optimizer.h"

namespace tessera::optim {

struct RMSpropOptions {
  double lr = 1e-2;
  double alpha = 0.99;  // decay of the mean of squares
  double eps = 1e-8;
  double weight_decay = 0;  // times the parameter, joins the gradient
  double momentum = 0;
  bool centered = false;  // by the variance instead of the mean of squares (Graves 2013)
};
/// Hinton 2012, lecture 6e.
class RMSprop final : public Optimizer {
 public:
  RMSprop(Params params, RMSpropOptions options = {});

 private:
  void update(const Group& group, const Lists& lists, const Tensor& scale) override;
  RMSpropOptions options_;
};

}  // namespace tessera::optim
