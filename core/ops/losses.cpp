#include "core/ops/losses.h"

#include <algorithm>
#include <cmath>

#include "core/dispatch/precision.h"
#include "core/ops/compose.h"
#include "core/ops/indexing.h"
#include "core/ops/pointwise.h"
#include "core/ops/views.h"

namespace tessera {
namespace {

Tensor reduced(const Tensor& loss, Reduction r) {
  return r == Reduction::kMean ? mean(loss) : r == Reduction::kSum ? sum(loss) : loss;
}

// Under autocast losses are computed in f32.
Tensor wide(const Tensor& x) { return autocast_operand(Precision::kWide, x); }

// Losses do not broadcast: a target of another shape is nearly always a mistake.
void check_shapes(const char* op, const Tensor& x, const Tensor& y) {
  TESSERA_CHECK_AS(ShapeError, x.shape() == y.shape(), "{}: x is {}, y is {}; reshape one of them",
                   op, describe(x), describe(y));
}

// A weight larger than the loss would add elements to it.
void check_weight(const char* op, const char* what, const Tensor& weight, const Tensor& x) {
  TESSERA_CHECK_AS(ShapeError,
                   !weight.defined() || broadcast(weight.shape(), x.shape(), op) == x.shape(),
                   "{}: {} {} does not broadcast to x {}", op, what, describe(weight), describe(x));
}

// Quadratic below `beta`, linear above: the pieces meet with equal slopes.
Tensor huber(const Tensor& x, const Tensor& y, double beta, double scale) {
  Tensor d = abs(wide(x) - wide(y));
  if (beta == 0) return d * scale;
  return where(lt(d, beta), square(d) * (0.5 / beta * scale), (d - 0.5 * beta) * scale);
}

// max(log x, -100) and max(log(1 - x), -100) with gradient 0 where a logarithm is -infinity: there
// 0 dx / 0 would be NaN.
Tensor bounded_log(const Tensor& x) {
  Tensor none = eq(x, 0);
  return masked_fill(clamp_min(log(masked_fill(x, none, 1)), -100.0), none, -100.0);
}
Tensor bounded_log_rest(const Tensor& x) {
  Tensor none = eq(x, 1);
  return masked_fill(clamp_min(log1p(-masked_fill(x, none, 0)), -100.0), none, -100.0);
}

}  // namespace

Tensor mse_loss(const Tensor& x, const Tensor& y, Reduction r) {
  check_shapes("mse_loss", x, y);
  return reduced(square(wide(x) - wide(y)), r);
}
Tensor l1_loss(const Tensor& x, const Tensor& y, Reduction r) {
  check_shapes("l1_loss", x, y);
  return reduced(abs(wide(x) - wide(y)), r);
}
Tensor smooth_l1_loss(const Tensor& x, const Tensor& y, double beta, Reduction r) {
  check_shapes("smooth_l1_loss", x, y);
  TESSERA_CHECK(beta >= 0, "smooth_l1_loss: beta {} is negative", beta);
  return reduced(huber(x, y, beta, 1), r);
}
Tensor huber_loss(const Tensor& x, const Tensor& y, double delta, Reduction r) {
  check_shapes("huber_loss", x, y);
  TESSERA_CHECK(delta > 0, "huber_loss: delta {} must be positive", delta);
  return reduced(huber(x, y, delta, delta), r);
}

Tensor binary_cross_entropy(const Tensor& given, const Tensor& y, const Tensor& weight,
                            Reduction r) {
  check_shapes("binary_cross_entropy", given, y);
  check_weight("binary_cross_entropy", "weight", weight, given);
  const Tensor x = wide(given);
  Tensor loss = (y - 1.0) * bounded_log_rest(x) - y * bounded_log(x);
  return reduced(weight.defined() ? loss * weight : loss, r);
}

Tensor binary_cross_entropy_with_logits(const Tensor& given, const Tensor& y, const Tensor& weight,
                                        const Tensor& pos_weight, Reduction r) {
  check_shapes("binary_cross_entropy_with_logits", given, y);
  check_weight("binary_cross_entropy_with_logits", "weight", weight, given);
  check_weight("binary_cross_entropy_with_logits", "pos_weight", pos_weight, given);
  const Tensor x = wide(given);
  Tensor positive = pos_weight.defined() ? (pos_weight - 1.0) * y + 1.0 : Tensor();
  Tensor tail = positive.defined() ? logsigmoid(x) * positive : logsigmoid(x);
  Tensor loss = (1.0 - y) * x - tail;
  return reduced(weight.defined() ? loss * weight : loss, r);
}

Tensor nll_loss(const Tensor& given, const Tensor& targets, const NllOptions& o) {
  const Tensor x = classes_last("nll_loss", wide(given), o.dim);
  TESSERA_CHECK_AS(
      ShapeError,
      x.ndim() == targets.ndim() + 1 &&
          std::equal(targets.shape().begin(), targets.shape().end(), x.shape().begin()),
      "nll_loss: x is {}, targets {}; takes x [N, V, ..] and targets [N, ..], classes in dim 1 (of "
      "one dim or two: the last), or where .dim says: -1 for [B, T, V]",
      describe(given), describe(targets));
  TESSERA_CHECK_AS(ShapeError, !o.weight.defined() || o.weight.shape() == Shape{x.size(-1)},
                   "nll_loss: the weight is {} for {} classes; it takes one for each",
                   describe(o.weight), x.size(-1));
  Tensor counts = ne(targets, o.ignore_index),
         t = where(counts, targets, number_beside(targets, 0, targets.dtype()));
  Tensor w = cast(counts, x.dtype());
  if (o.weight.defined()) w = w * reshape(index_select(o.weight, 0, reshape(t, {-1})), t.shape());
  Tensor picked = squeeze(gather(x, -1, unsqueeze(t, -1)), -1);
  Tensor loss = -where(counts, picked, number_beside(x, 0, x.dtype())) * w;
  if (o.reduction != Reduction::kMean) return reduced(loss, o.reduction);
  return sum(loss) / sum(w);
}

Tensor kl_div(const Tensor& x, const Tensor& target, KlReduction r) {
  check_shapes("kl_div", x, target);
  Tensor loss = xlogy(wide(target), wide(target)) - wide(target) * wide(x);
  if (r == KlReduction::kBatchMean) {
    TESSERA_CHECK_AS(ShapeError, x.ndim() > 0 && x.size(0) > 0, "kl_div: batch mean of {}",
                     describe(x));
    return sum(loss) / double(x.size(0));
  }
  return r == KlReduction::kNone ? loss : r == KlReduction::kSum ? sum(loss) : mean(loss);
}

// ---- pairs and margins

Tensor margin_ranking_loss(const Tensor& a, const Tensor& b, const Tensor& y, double margin,
                           Reduction r) {
  check_shapes("margin_ranking_loss", a, b);
  check_shapes("margin_ranking_loss", a, y);
  return reduced(clamp_min(margin - y * (wide(a) - wide(b)), 0), r);
}

Tensor cosine_embedding_loss(const Tensor& a, const Tensor& b, const Tensor& y, double margin,
                             Reduction r) {
  check_shapes("cosine_embedding_loss", a, b);
  TESSERA_CHECK_AS(ShapeError,
                   a.ndim() == y.ndim() + 1 && (y.ndim() == 0 || y.size(0) == a.size(0)),
                   "cosine_embedding_loss: a is {}, y {}; takes [N, D] and [N], or [D] and one y",
                   describe(a), describe(y));
  constexpr double kEps = 1e-12;
  const Tensor p = wide(a), q = wide(b);
  const Tensor norms = (sum(square(p), -1) + kEps) * (sum(square(q), -1) + kEps);
  const Tensor cosine = sum(p * q, -1) / sqrt(norms);
  return reduced(where(eq(y, 1), 1.0 - cosine, clamp_min(cosine - margin, 0)), r);
}

Tensor hinge_embedding_loss(const Tensor& x, const Tensor& y, double margin, Reduction r) {
  check_shapes("hinge_embedding_loss", x, y);
  const Tensor d = wide(x);
  return reduced(where(eq(y, 1), d, clamp_min(margin - d, 0)), r);
}

Tensor soft_margin_loss(const Tensor& x, const Tensor& y, Reduction r) {
  check_shapes("soft_margin_loss", x, y);
  return reduced(-logsigmoid(wide(x) * y), r);
}

Tensor triplet_margin_loss(const Tensor& anchor, const Tensor& positive, const Tensor& negative,
                           const TripletOptions& o) {
  check_shapes("triplet_margin_loss", anchor, positive);
  check_shapes("triplet_margin_loss", anchor, negative);
  const Tensor a = wide(anchor), p = wide(positive), n = wide(negative);
  Tensor far = pairwise_distance(a, n, o.p, o.eps);
  if (o.swap) far = minimum(far, pairwise_distance(p, n, o.p, o.eps));
  return reduced(clamp_min(pairwise_distance(a, p, o.p, o.eps) - far + o.margin, 0), o.reduction);
}

// ---- classes

Tensor multilabel_soft_margin_loss(const Tensor& x, const Tensor& y, const Tensor& weight,
                                   Reduction r) {
  check_shapes("multilabel_soft_margin_loss", x, y);
  return reduced(mean(binary_cross_entropy_with_logits(x, y, weight, {}, Reduction::kNone), -1), r);
}

Tensor multi_margin_loss(const Tensor& x, const Tensor& targets, int64_t p, double margin,
                         Reduction r) {
  TESSERA_CHECK_AS(ShapeError, x.ndim() == 2 && targets.ndim() == 1 && x.size(0) == targets.size(0),
                   "multi_margin_loss: x is {}, targets {}; takes [N, V] and [N]", describe(x),
                   describe(targets));
  TESSERA_CHECK(p == 1 || p == 2, "multi_margin_loss: power {}; it is 1 or 2", p);
  const Tensor at = unsqueeze(targets, 1), f = wide(x);
  Tensor over = clamp_min(margin - gather(f, 1, at) + f, 0);
  over = scatter(p == 1 ? over : square(over), 1, at, 0);
  return reduced(mean(over, 1), r);
}

Tensor sigmoid_focal_loss(const Tensor& x, const Tensor& y, double alpha, double gamma,
                          Reduction r) {
  const Tensor bce = binary_cross_entropy_with_logits(x, y, {}, {}, Reduction::kNone);
  const Tensor q = sigmoid(wide(x)), other = q + y - q * y * 2.0;  // 1 - the probability of y
  Tensor loss = bce * pow(other, gamma);
  if (alpha >= 0) loss = loss * (y * (2 * alpha - 1) + (1 - alpha));
  return reduced(loss, r);
}

// ---- likelihoods

Tensor poisson_nll_loss(const Tensor& x, const Tensor& y, const PoissonOptions& o) {
  check_shapes("poisson_nll_loss", x, y);
  const Tensor f = wide(x);
  Tensor loss = o.log_input ? exp(f) - y * f : f - y * log(f + o.eps);
  if (o.full) {
    const Tensor many = maximum(y, 1.0);  // what is not looked at has a logarithm, too
    const Tensor stirling = many * log(many) - many + log(many * (2 * M_PI)) * 0.5;
    loss = loss + where(gt(y, 1), stirling, 0.0);
  }
  return reduced(loss, o.reduction);
}

Tensor gaussian_nll_loss(const Tensor& x, const Tensor& y, const Tensor& var,
                         const GaussianOptions& o) {
  check_shapes("gaussian_nll_loss", x, y);
  check_weight("gaussian_nll_loss", "var", var, x);
  const Tensor given = wide(var), least = maximum(given.detach(), o.eps);
  const Tensor v = given + (least - given.detach());
  Tensor loss = (log(v) + square(wide(x) - wide(y)) / v) * 0.5;
  if (o.full) loss = loss + 0.5 * std::log(2 * M_PI);
  return reduced(loss, o.reduction);
}

}  // namespace tessera
