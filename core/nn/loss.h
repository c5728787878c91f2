// Losses under nn's names: the functions of core/ops/losses.h, and objects that keep their options,
// loss(x, y).
#pragma once
#include "core/ops/losses.h"

namespace tessera::nn {

using tessera::binary_cross_entropy;
using tessera::binary_cross_entropy_with_logits;
using tessera::cosine_embedding_loss;
using tessera::cross_entropy;
using tessera::gaussian_nll_loss;
using tessera::hinge_embedding_loss;
using tessera::huber_loss;
using tessera::kl_div;
using tessera::l1_loss;
using tessera::margin_ranking_loss;
using tessera::mse_loss;
using tessera::multi_margin_loss;
using tessera::multilabel_soft_margin_loss;
using tessera::nll_loss;
using tessera::poisson_nll_loss;
using tessera::sigmoid_focal_loss;
using tessera::smooth_l1_loss;
using tessera::soft_margin_loss;
using tessera::triplet_margin_loss;

/// nn::CrossEntropyLoss loss({.label_smoothing = 0.1}); loss(logits, targets)
class CrossEntropyLoss {
 public:
  explicit CrossEntropyLoss(CrossEntropyOptions options = {}) : options(std::move(options)) {}
  Tensor operator()(const Tensor& logits, const Tensor& targets) const {
    return tessera::cross_entropy(logits, targets, options);
  }
  const CrossEntropyOptions options;
};
class NLLLoss {
 public:
  explicit NLLLoss(NllOptions options = {}) : options(std::move(options)) {}
  Tensor operator()(const Tensor& x, const Tensor& targets) const {
    return tessera::nll_loss(x, targets, options);
  }
  const NllOptions options;
};
/// A loss of x and y with one option, its reduction.
template <Tensor (*Function)(const Tensor&, const Tensor&, Reduction)>
class ReducedLoss {
 public:
  explicit ReducedLoss(Reduction reduction = Reduction::kMean) : reduction(reduction) {}
  Tensor operator()(const Tensor& x, const Tensor& y) const { return Function(x, y, reduction); }
  const Reduction reduction;
};
using MSELoss = ReducedLoss<tessera::mse_loss>;
using L1Loss = ReducedLoss<tessera::l1_loss>;
/// Their functions also take weights, which are tensors of one batch.
class BCELoss {
 public:
  explicit BCELoss(Reduction reduction = Reduction::kMean) : reduction(reduction) {}
  Tensor operator()(const Tensor& x, const Tensor& y) const {
    return tessera::binary_cross_entropy(x, y, {}, reduction);
  }
  const Reduction reduction;
};
class BCEWithLogitsLoss {
 public:
  explicit BCEWithLogitsLoss(Tensor pos_weight = {}, Reduction reduction = Reduction::kMean)
      : pos_weight(std::move(pos_weight)), reduction(reduction) {}
  Tensor operator()(const Tensor& x, const Tensor& y) const {
    return tessera::binary_cross_entropy_with_logits(x, y, {}, pos_weight, reduction);
  }
  const Tensor pos_weight;
  const Reduction reduction;
};

}  // namespace tessera::nn
