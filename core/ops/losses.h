// Losses as compositions, with PyTorch's arguments and reductions. cross_entropy is in fused.h.
// They do not broadcast: where the two operands are values of one kind, another shape is a
// ShapeError. Weights do, to the shape of the loss.
#pragma once
#include "core/ops/fused.h"

namespace tessera {

Tensor mse_loss(const Tensor& x, const Tensor& y, Reduction reduction = Reduction::kMean);
Tensor l1_loss(const Tensor& x, const Tensor& y, Reduction reduction = Reduction::kMean);
/// d^2 / (2 beta) below beta, d - beta/2 above, where d = |x - y|.
Tensor smooth_l1_loss(const Tensor& x, const Tensor& y, double beta = 1,
                      Reduction reduction = Reduction::kMean);
/// delta times smooth_l1_loss with beta = delta: Huber 1964.
Tensor huber_loss(const Tensor& x, const Tensor& y, double delta = 1,
                  Reduction reduction = Reduction::kMean);
/// -(y log x + (1 - y) log(1 - x)) weight, x floats in 0 to 1 (NaN outside); logarithms stop at
/// -100, and one that stopped has gradient 0.
Tensor binary_cross_entropy(const Tensor& x, const Tensor& y, const Tensor& weight = {},
                            Reduction reduction = Reduction::kMean);
/// The same of sigmoid(x), without overflow; `pos_weight` multiplies the first term.
Tensor binary_cross_entropy_with_logits(const Tensor& x, const Tensor& y, const Tensor& weight = {},
                                        const Tensor& pos_weight = {},
                                        Reduction reduction = Reduction::kMean);

struct NllOptions {
  Tensor weight = {};           // [V], per class; the mean then divides by the weights' sum
  int64_t ignore_index = -100;  // targets that count for nothing
  Reduction reduction = Reduction::kMean;
};
/// -x[target]. x [.., V] log-probabilities, targets [..] i64.
Tensor nll_loss(const Tensor& x, const Tensor& targets, const NllOptions& options = {});

enum class KlReduction : uint8_t { kMean, kBatchMean, kSum, kNone };
/// target (log target - x), x being log-probabilities.
Tensor kl_div(const Tensor& x, const Tensor& target, KlReduction reduction = KlReduction::kMean);

}  // namespace tessera
