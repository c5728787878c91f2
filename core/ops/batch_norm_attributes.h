// Attributes of batch-norm, as its kernels read them.
#pragma once
#include "core/primitive/attributes.h"

namespace tessera {

/// Which optional parts a batch-norm has. Operands of the op: x, then weight, bias, residual where
/// present; results y, mean, var. Its gradient has operands g, x, mean, var, then weight where
/// present, then y if there is a relu; results dx, then those of residual, weight and bias wanted.
struct BatchNormForm {
  bool weight = false, bias = false;
  bool residual = false;  // is added to the normalised x
  bool relu = false;      // is applied last
  static void fields(auto& a, auto& f) {
    f("has_weight", a.weight), f("has_bias", a.bias), f("has_residual", a.residual);
    f("relu", a.relu);
  }
};

struct BatchNormAttributes {
  double eps = 0;
  BatchNormForm form;
  static void fields(auto& a, auto& f) { f("eps", a.eps), f.within(a.form); }
};

}  // namespace tessera
