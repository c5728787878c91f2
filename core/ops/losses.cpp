#include "core/ops/losses.h"

#include <algorithm>

#include "core/dispatch/context.h"
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
Tensor wide(const Tensor& x) { return autocast_meets({x.dtype()}) ? cast(x, kF32) : x; }

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

Tensor binary_cross_entropy(const Tensor& x, const Tensor& y, const Tensor& weight, Reduction r) {
  check_shapes("binary_cross_entropy", x, y);
  check_weight("binary_cross_entropy", "weight", weight, x);
  if (autocast_meets({x.dtype()}) && x.dtype() != kF32)
    return binary_cross_entropy(wide(x), y, weight, r);
  Tensor loss = (y - 1.0) * bounded_log_rest(x) - y * bounded_log(x);
  return reduced(weight.defined() ? loss * weight : loss, r);
}

Tensor binary_cross_entropy_with_logits(const Tensor& x, const Tensor& y, const Tensor& weight,
                                        const Tensor& pos_weight, Reduction r) {
  check_shapes("binary_cross_entropy_with_logits", x, y);
  check_weight("binary_cross_entropy_with_logits", "weight", weight, x);
  check_weight("binary_cross_entropy_with_logits", "pos_weight", pos_weight, x);
  if (autocast_meets({x.dtype()}) && x.dtype() != kF32)
    return binary_cross_entropy_with_logits(wide(x), y, weight, pos_weight, r);
  Tensor positive = pos_weight.defined() ? (pos_weight - 1.0) * y + 1.0 : Tensor();
  Tensor tail = positive.defined() ? logsigmoid(x) * positive : logsigmoid(x);
  Tensor loss = (1.0 - y) * x - tail;
  return reduced(weight.defined() ? loss * weight : loss, r);
}

Tensor nll_loss(const Tensor& x, const Tensor& targets, const NllOptions& o) {
  TESSERA_CHECK_AS(
      ShapeError,
      x.ndim() == targets.ndim() + 1 &&
          std::equal(targets.shape().begin(), targets.shape().end(), x.shape().begin()),
      "nll_loss: x is {}, targets {}; takes x [.., V], its classes last, and targets [..]",
      describe(x), describe(targets));
  TESSERA_CHECK_AS(ShapeError, !o.weight.defined() || o.weight.shape() == Shape{x.size(-1)},
                   "nll_loss: the weight is {} for {} classes; it takes one for each",
                   describe(o.weight), x.size(-1));
  if (autocast_meets({x.dtype()}) && x.dtype() != kF32) return nll_loss(wide(x), targets, o);
  Tensor counts = ne(targets, o.ignore_index),
         t = where(counts, targets, scalar_tensor(0, targets.dtype(), targets.device()));
  Tensor w = cast(counts, x.dtype());
  if (o.weight.defined()) w = w * reshape(index_select(o.weight, 0, reshape(t, {-1})), t.shape());
  Tensor picked = squeeze(gather(x, -1, unsqueeze(t, -1)), -1);
  Tensor loss = -where(counts, picked, scalar_tensor(0, x.dtype(), x.device())) * w;
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

}  // namespace tessera
