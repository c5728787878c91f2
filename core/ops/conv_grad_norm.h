// The gradient of a convolution by its input, and what the derivative of the batch-norm whose
// result that input is sums of it, in one op, which the compiler makes of the two
// (compile/passes/join_norm_grads.cpp) for devices that sum what they store. Elsewhere it is the
// ops that it stands for.
#pragma once
#include "core/ops/conv_norm.h"

namespace tessera {

/// The op of a convolution's gradient by its input, whose spatial extents are the `size` of
/// `attributes`: operands g and w, result dx.
PrimRef conv_grad_input_op(const ConvAttributes& attributes);
/// Throws UserError for attributes that no such gradient has.
void check_conv_grad_input(const ConvAttributes& attributes);

/// With `conv` of a conv_grad_input and `norm` of a batch-norm's derivative:
///   h = conv_grad_input(g, w) + other, where y > 0, else 0
/// Operands g, w, then x [N, C, ..], mean and var [C] of the batch-norm, y behind a relu, and
/// `other` where `norm` has a residual: both are as x. Results: h as x, and for each channel [C]
/// the means of h and of h (x - mean), which batch_norm_grad_apply takes, then the gradient of
/// weight, sum(h (x - mean)) / sqrt(var + eps), and of bias, sum(h), where `norm` has these. What
/// has one value a channel is f32, f64 beside an f64 x.
PrimRef conv_grad_norm_op(const ConvNormAttributes& attributes);

}  // namespace tessera
