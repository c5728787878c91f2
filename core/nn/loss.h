// Losses beyond cross_entropy (core/ops/fused.h). Each compares x with y of one shape and reduces
// to the mean unless told otherwise.
#pragma once
#include "core/ops/fused.h"

namespace tessera::nn {

using tessera::cross_entropy;

/// (x - y)^2
Tensor mse_loss(const Tensor& x, const Tensor& y, Reduction reduction = Reduction::kMean);
/// |x - y|
Tensor l1_loss(const Tensor& x, const Tensor& y, Reduction reduction = Reduction::kMean);
/// d^2 / 2 where d = |x - y| < delta, delta (d - delta / 2) elsewhere. Huber 1964.
Tensor huber_loss(const Tensor& x, const Tensor& y, double delta = 1,
                  Reduction reduction = Reduction::kMean);
/// huber_loss / beta.
Tensor smooth_l1_loss(const Tensor& x, const Tensor& y, double beta = 1,
                      Reduction reduction = Reduction::kMean);
/// -(y log s + (1 - y) log(1 - s)) with s = sigmoid(x); `pos_weight`, where given, multiplies the
/// first term.
Tensor binary_cross_entropy_with_logits(const Tensor& x, const Tensor& y,
                                        Reduction reduction = Reduction::kMean,
                                        const Tensor& pos_weight = {});

}  // namespace tessera::nn
