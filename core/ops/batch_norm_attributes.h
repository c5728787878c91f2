// Attributes of batch-norm, as its kernels read them.
#pragma once
#include "core/primitive/primitive.h"

namespace tessera {

/// What a batch-norm has beside x. Operands of the op: x, then weight, bias, residual where
/// present; results y, mean, var. Of the gradient: g, x, mean, var, then weight where present, then
/// y behind a relu; results dx, then those of residual, weight and bias where wanted.
struct BatchNormForm {
  bool weight = false, bias = false;
  bool residual = false;  // added to the normalised x
  bool relu = false;      // of all that
};

struct BatchNormAttributes : Primitive {
  BatchNormAttributes(const OpInfo& op, double eps, const BatchNormForm& form)
      : Primitive(op), eps(eps), form(form) {}
  const double eps;
  const BatchNormForm form;
};

}  // namespace tessera
