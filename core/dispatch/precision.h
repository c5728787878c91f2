// Dtypes of operands on their way down: autocast casts them to what an op computes in, and those
// that still differ are promoted. The dispatch path does both by the traits of the op; a function
// that is made of several ops, and has a precision as one, does the first itself.
#pragma once
#include "core/primitive/primitive.h"

namespace tessera {

/// Casts `in` as autocast casts the operands of an op of this precision; where autocast is off,
/// they stay as they are. Defined by core/autograd.
void autocast_operands(Precision precision, Inputs in);
inline Tensor autocast_operand(Precision precision, Tensor x) {
  autocast_operands(precision, {&x, 1});
  return x;
}

/// Casts `in` to the one dtype in which they meet. Defined by core/ops.
void promote_operands(Inputs in);

}  // namespace tessera
