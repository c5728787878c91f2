// Parts of batch-norm, for the ops that have them beside another result.
#pragma once
#include "core/ops/batch_norm_attributes.h"
#include "core/tensor/stream.h"
#include "core/tensor/tensor.h"

namespace tessera::cuda {

/// Enqueues mean and (biased) variance of each channel of x [N, C, ..], which has elements.
void moments(const Tensor& x, const Tensor& mean, const Tensor& var, const Stream& stream);
/// The same of a 16-bit x by the sums of its channels and of their squares, f32 [C].
void moments_of_sums(const Tensor& x, const Tensor& sum, const Tensor& squares, const Tensor& mean,
                     const Tensor& var, const Stream& stream);

/// Enqueues batch_norm_apply: `in` has x, which has elements, mean, var and those of weight, bias
/// and residual that `a` has. y may lie in the memory of x.
void apply_norm(const BatchNormAttributes& a, std::span<const Tensor> in, const Tensor& y,
                const Stream& stream);

/// What conv_grad_norm computes behind the convolution's gradient: x, var, mean and maybe y and
/// `other` are its operands, h the first of its results and `results` the others.
struct GradSums {
  const BatchNormAttributes& norm;
  Tensor x, mean, var, y, other, h;
  std::span<const Tensor> results;
};
/// Enqueues them all, from what lies in h without y and `other`.
void masked_sums(const GradSums& s, const Stream& stream);
/// Enqueues all but h by the sums of h and of h (x - mean), f32 [C]; x is of 16 bits.
void grads_of_sums(const GradSums& s, const Tensor& sum, const Tensor& products,
                   const Stream& stream);

}  // namespace tessera::cuda
