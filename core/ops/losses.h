// Losses as compositions of ops, with PyTorch's arguments and reductions. cross_entropy is in
// fused.h. Operands do not broadcast: two operands of the same kind must have one shape, else a
// ShapeError is thrown. Weights do broadcast, to the shape of the loss.
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
/// -(y log x + (1 - y) log(1 - x)) weight, x floats in 0 to 1 (NaN outside). Logarithms are at
/// least -100; one that is clamped to that has gradient 0.
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
  std::optional<int64_t> dim = {};  // of the classes; none: as classes_last
};
/// -x[target]. x [N, V, ..] or [V] log-probabilities, classes where cross_entropy has them; targets
/// [N, ..] i64.
Tensor nll_loss(const Tensor& x, const Tensor& targets, const NllOptions& options = {});

enum class KlReduction : uint8_t { kMean, kBatchMean, kSum, kNone };
/// target (log target - x), x being log-probabilities.
Tensor kl_div(const Tensor& x, const Tensor& target, KlReduction reduction = KlReduction::kMean);

// Losses of pairs: y is 1 where the two belong together or are in order, else -1.
/// max(0, margin - y (a - b)).
Tensor margin_ranking_loss(const Tensor& a, const Tensor& b, const Tensor& y, double margin = 0,
                           Reduction reduction = Reduction::kMean);
/// a, b [N, D] (or [D]), y [N]: 1 - cos(a, b), or max(0, cos(a, b) - margin) where y is -1.
Tensor cosine_embedding_loss(const Tensor& a, const Tensor& b, const Tensor& y, double margin = 0,
                             Reduction reduction = Reduction::kMean);
/// Elements x where y is 1, max(0, margin - x) where y is -1.
Tensor hinge_embedding_loss(const Tensor& x, const Tensor& y, double margin = 1,
                            Reduction reduction = Reduction::kMean);
/// log(1 + exp(-y x)).
Tensor soft_margin_loss(const Tensor& x, const Tensor& y, Reduction reduction = Reduction::kMean);

struct TripletOptions {
  double margin = 1, p = 2, eps = 1e-6;
  bool swap = false;  // takes the distance from the positive where less: Balntas et al. 2016
  Reduction reduction = Reduction::kMean;
};
/// max(0, d(anchor, positive) - d(anchor, negative) + margin), d being pairwise_distance.
Tensor triplet_margin_loss(const Tensor& anchor, const Tensor& positive, const Tensor& negative,
                           const TripletOptions& options = {});
/// x [.., V], y [.., V] of 0 and 1: the mean over classes of binary_cross_entropy_with_logits.
Tensor multilabel_soft_margin_loss(const Tensor& x, const Tensor& y, const Tensor& weight = {},
                                   Reduction reduction = Reduction::kMean);
/// x [N, V], targets [N] i64: the mean over classes j of max(0, margin - x[target] + x[j])^p, the
/// target's own left out. p is 1 or 2.
Tensor multi_margin_loss(const Tensor& x, const Tensor& targets, int64_t p = 1, double margin = 1,
                         Reduction reduction = Reduction::kMean);
/// binary_cross_entropy_with_logits times (1 - q)^gamma, q being the probability given to y, and
/// alpha where y is 1, 1 - alpha where it is 0 (negative alpha: no such weights). Lin et al. 2017.
Tensor sigmoid_focal_loss(const Tensor& x, const Tensor& y, double alpha = 0.25, double gamma = 2,
                          Reduction reduction = Reduction::kNone);

struct PoissonOptions {
  bool log_input = true;  // x is the logarithm of the rate
  bool full = false;      // with Stirling's approximation of log(y!)
  double eps = 1e-8;
  Reduction reduction = Reduction::kMean;
};
/// exp(x) - y x, or x - y log(x + eps).
Tensor poisson_nll_loss(const Tensor& x, const Tensor& y, const PoissonOptions& options = {});
struct GaussianOptions {
  bool full = false;  // with the constant, log(2 pi) / 2
  double eps = 1e-6;  // the least variance; its bound has no gradient
  Reduction reduction = Reduction::kMean;
};
/// (log var + (x - y)^2 / var) / 2; var broadcasts to x.
Tensor gaussian_nll_loss(const Tensor& x, const Tensor& y, const Tensor& var,
                         const GaussianOptions& options = {});

}  // namespace tessera
