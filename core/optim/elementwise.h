// RMSprop, Adagrad and Lion, made of ordinary ops, with PyTorch's options and defaults. Eager steps
// make some passes over each parameter; a compiled step fuses them. As SGD and Adam they take f32
// and f64 parameters.
#pragma once
#include <array>

#include "core/optim/optimizer.h"

namespace tessera::optim {

struct RMSpropOptions {
  double lr = 1e-2;
  double alpha = 0.99;  // what the mean of squares keeps of itself
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
