// Batch-norm in parts, for programs whose statistics cover the batches of several ranks. Each part
// reads its operands once, and one value a channel passes between them. batch_norm is stats, then
// apply; its derivative is grad_stats, then grad_apply of the sums divided by n, the number of
// values a channel. x is [N, C, ..]; values a channel are [C] in f32, in f64 beside an f64 x, also
// as results. 16-bit floats are computed in f32.
#pragma once
#include "core/ops/batch_norm.h"
#include "core/ops/batch_norm_attributes.h"

namespace tessera {

struct ChannelMoments {
  Tensor mean, var;  // var is biased; both are 0 where x is empty
};
ChannelMoments batch_norm_stats(const Tensor& x);

/// (x - mean) / sqrt(var + eps) * weight + bias, then what `then` says. weight and bias may be
/// undefined.
Tensor batch_norm_apply(const Tensor& x, const ChannelMoments& of, const Tensor& weight,
                        const Tensor& bias, double eps, const NormThen& then = {});

/// The op of batch_norm_apply: operands x, mean, var, then weight, bias and residual as `form` has
/// them.
PrimRef batch_norm_apply_op(const BatchNormAttributes& attributes);

struct ChannelSums {
  Tensor g, gx;  // sum(g), sum(g (x - mean))
};
/// Sums g where y > 0, or everywhere where y is undefined.
ChannelSums batch_norm_grad_stats(const Tensor& g, const Tensor& x, const Tensor& mean,
                                  const Tensor& y = {});

/// The op of batch_norm_grad_stats: operands g, x, mean, then y behind a relu.
PrimRef batch_norm_grad_stats_op(bool relu);

struct BatchNormGrads {
  Tensor x, residual;
};
/// `mean` is grad_stats divided by the number of values, and r = 1 / sqrt(var + eps). Gives the
/// derivative with respect to x, (g - mean.g - (x - of.mean) r^2 mean.gx) r weight, and, where
/// `residual`, g itself. As above, g counts only where y > 0.
BatchNormGrads batch_norm_grad_apply(const Tensor& g, const Tensor& x, const ChannelMoments& of,
                                     const ChannelSums& mean, const Tensor& weight, double eps,
                                     const Tensor& y = {}, bool residual = false);

/// The op of batch_norm_grad_apply: operands g, x, mean and var of x, the means of g and of
/// g (x - mean), then weight as `form` has it, then y behind a relu. `form` has a residual where
/// its derivative is wanted.
PrimRef batch_norm_grad_apply_op(const BatchNormAttributes& attributes);

/// follow_moments_ of batch_norm.h with `count` as a tensor (0-d, f64), for a sum over ranks.
void follow_moments_(const Tensor& running_mean, const Tensor& running_var, const BatchMoments& now,
                     const Tensor& count, const Tensor& factor);

}  // namespace tessera
