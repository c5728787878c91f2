// A convolution and the batch-norm of its result by given moments in one op, which the compiler
// makes of the two in inference (compile/passes/join_norms.cpp) for devices that normalise what
// they store. Elsewhere it is the two ops that it stands for.
#pragma once
#include "core/ops/batch_norm_attributes.h"
#include "core/ops/conv_attributes.h"
#include "core/primitive/registry.h"

namespace tessera {

struct ConvNormAttributes {
  ConvAttributes conv;
  BatchNormAttributes norm;
  static void fields(auto& a, auto& f) { f.within(a.conv), f.within(a.norm); }
};

/// Operands x and w of the convolution, then mean, var and those of weight, bias and residual that
/// `norm` has; result batch_norm_apply(conv(x, w), mean, var, ..).
PrimRef conv_norm_op(const ConvNormAttributes& attributes);

}  // namespace tessera
