// Normalisation of [N, C, ..] over everything but channels (batch-norm, Ioffe, Szegedy 2015) or
// over groups of channels (Wu, He 2018). Names, defaults and semantics are PyTorch's.
#pragma once
#include "core/primitive/registry.h"

namespace tessera {

struct BatchNormOptions {
  Tensor weight = {}, bias = {};  // [C]
  bool training = false;
  double momentum = 0.1;  // of a batch in the running statistics
  double eps = 1e-5;
};
/// What is computed after a norm, in the same passes over memory: relu(y + residual). 16-bit
/// results are rounded once, not after every step.
struct NormThen {
  Tensor residual = {};  // as x; of another shape or dtype it is added as `+` does, in its own pass
  bool relu = false;
  Tensor operator()(Tensor y) const;
};

/// (x - mean) / sqrt(var + eps) * weight + bias, then what `then` says; x [N, C, ..] floats. In
/// training, mean and (biased) variance are those of this batch, and running_mean [C] and
/// running_var [C], where given, move towards them by `momentum` (the variance unbiased), by
/// assign_. Otherwise they are the running ones. 16-bit floats are computed in f32. A sharded x may
/// be split along the channels only.
Tensor batch_norm(const Tensor& x, const Tensor& running_mean, const Tensor& running_var,
                  const BatchNormOptions& options = {}, const NormThen& then = {});

struct BatchMoments {
  Tensor y, mean, var;  // of the batch, [C], f32 or f64; var is biased
};
/// Batch-norm in training, with the batch's statistics; only y is differentiable.
BatchMoments batch_norm_moments(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                double eps, const NormThen& then = {});
/// running += factor (now - running) for both, the variance of `count` values made unbiased first.
void follow_moments_(const Tensor& running_mean, const Tensor& running_var, const BatchMoments& now,
                     int64_t count, const Tensor& factor);

/// Divides the channels of each sample into `groups` and normalises each group over its channels
/// and spatial places; then weight [C] and bias [C], either may be undefined. The result has x's
/// dtype; 16-bit floats are computed in f32 and rounded once.
Tensor group_norm(const Tensor& x, int64_t groups, const Tensor& weight = {},
                  const Tensor& bias = {}, double eps = 1e-5);
/// group_norm with a group for every channel.
Tensor instance_norm(const Tensor& x, const Tensor& weight = {}, const Tensor& bias = {},
                     double eps = 1e-5);

}  // namespace tessera
