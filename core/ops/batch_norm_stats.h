// Batch-norm in its parts, for those who compute statistics over more than one rank's batch: each
// part reads its operands once, and what is between them is one value a channel. With n values a
// channel, batch_norm is stats and apply, its derivative grad_stats and grad_apply of the sums
// over n. x is [N, C, ..]; what has one value a channel is [C] of f32, f64 beside an f64 x, and is
// returned so. 16-bit floats are computed in f32.
#pragma once
#include "core/ops/batch_norm.h"

namespace tessera {

struct ChannelMoments {
  Tensor mean, var;  // var is biased; both are 0 where x is empty
};
ChannelMoments batch_norm_stats(const Tensor& x);

/// (x - mean) / sqrt(var + eps) * weight + bias, then what `then` says. weight and bias may be
/// undefined.
Tensor batch_norm_apply(const Tensor& x, const ChannelMoments& of, const Tensor& weight,
                        const Tensor& bias, double eps, const NormThen& then = {});

struct ChannelSums {
  Tensor g, gx;  // sum(g), sum(g (x - mean))
};
/// g counts where y > 0, everywhere where y is undefined.
ChannelSums batch_norm_grad_stats(const Tensor& g, const Tensor& x, const Tensor& mean,
                                  const Tensor& y = {});

struct BatchNormGrads {
  Tensor x, residual;
};
/// With `mean` being grad_stats over the number of values, r = 1 / sqrt(var + eps): the derivative
/// (g - mean.g - (x - of.mean) r^2 mean.gx) r weight with respect to x, and g itself, counted as
/// above, where `residual`.
BatchNormGrads batch_norm_grad_apply(const Tensor& g, const Tensor& x, const ChannelMoments& of,
                                     const ChannelSums& mean, const Tensor& weight, double eps,
                                     const Tensor& y = {}, bool residual = false);

/// As follow_moments_ of batch_norm.h with a `count` (0-d, f64) that the program does not know.
void follow_moments_(const Tensor& running_mean, const Tensor& running_var, const BatchMoments& now,
                     const Tensor& count, const Tensor& factor);

}  // namespace tessera
