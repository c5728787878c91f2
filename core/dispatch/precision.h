// Dtypes of operands on their way through dispatch: autocast casts them to the dtype that an op
// computes in, and dtypes that still differ are promoted. Dispatch does both by the traits of the
// op; a function made of several ops that has one precision as a whole calls the first itself.
#pragma once
#include "core/primitive/primitive.h"

namespace tessera {

/// Casts `in` as autocast casts the operands of an op of this precision; leaves `in` as it is where
/// autocast is off. Defined by core/autograd.
void autocast_operands(Precision precision, Inputs in);
inline Tensor autocast_operand(Precision precision, Tensor x) {
  autocast_operands(precision, {&x, 1});
  return x;
}

/// Casts `in` to the one dtype that result_type gives for them. Defined by core/ops.
void promote_operands(Inputs in);

}  // namespace tessera
