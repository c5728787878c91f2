// Attributes of batch-norm, as its kernels read them.
#pragma once
#include "core/primitive/primitive.h"

namespace tessera {

/// Operands x, then weight and bias where the op has them; those of the gradient are in
/// batch_norm.cpp.
struct BatchNormAttributes : Primitive {
  BatchNormAttributes(OpId id, double eps, bool has_weight, bool has_bias)
      : Primitive(id), eps(eps), has_weight(has_weight), has_bias(has_bias) {}
  const double eps;
  const bool has_weight, has_bias;
};

}  // namespace tessera
