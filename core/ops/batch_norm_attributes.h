// Attributes of batch-norm, as its kernels read them.
#pragma once
#include "core/primitive/attributes.h"

namespace tessera {

/// What a batch-norm has beside x. Operands of the op: x, then weight, bias, residual where
/// present; results y, mean, var. Of the gradient: g, x, mean, var, then weight where present, then
/// y behind a relu; results dx, then those of residual, weight and bias where wanted.
struct BatchNormForm {
  bool weight = false, bias = false;
  bool residual = false;  // added to the normalised x
  bool relu = false;      // of all that
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
