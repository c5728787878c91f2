// Moments of channels, for the ops that have them beside another result.
#pragma once
#include "core/tensor/stream.h"
#include "core/tensor/tensor.h"

namespace tessera::cuda {

/// Enqueues mean and (biased) variance of each channel of x [N, C, ..], which has elements.
void moments(const Tensor& x, const Tensor& mean, const Tensor& var, const Stream& stream);
/// The same of a 16-bit x by the sums of its channels and of their squares, f32 [C].
void moments_of_sums(const Tensor& x, const Tensor& sum, const Tensor& squares, const Tensor& mean,
                     const Tensor& var, const Stream& stream);

}  // namespace tessera::cuda
