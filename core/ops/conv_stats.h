// A convolution and the moments of its result's channels in one op, which the compiler makes of a
// convolution and a batch-norm (compile/passes/join_stats.cpp) for devices that sum what they
// store. Elsewhere it is the two ops that it stands for.
#pragma once
#include "core/ops/conv_attributes.h"
#include "core/primitive/registry.h"

namespace tessera {

/// The op of a convolution with this window: operands x and w, result y.
PrimRef conv_op(const ConvAttributes& attributes);
/// Throws UserError for attributes that no convolution has.
void check_conv(const ConvAttributes& attributes);
/// The same operands; results y, mean and var, which are those of batch_norm_stats(y).
PrimRef conv_stats_op(const ConvAttributes& attributes);

}  // namespace tessera
