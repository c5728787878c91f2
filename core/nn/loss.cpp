#include "core/nn/loss.h"

#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"

namespace tessera::nn {
namespace {

void check_shapes(const char* op, const Tensor& x, const Tensor& y) {
  TESSERA_CHECK_AS(ShapeError, x.shape() == y.shape(), "{}: x is {}, y is {}; reshape one of them",
                   op, describe(x), describe(y));
}

Tensor reduced(Tensor loss, Reduction reduction) {
  switch (reduction) {
    case Reduction::kMean: return mean(loss);
    case Reduction::kSum: return sum(loss);
    case Reduction::kNone: break;
  }
  return loss;
}

}  // namespace

Tensor mse_loss(const Tensor& x, const Tensor& y, Reduction reduction) {
  check_shapes("mse_loss", x, y);
  return reduced(square(x - y), reduction);
}

Tensor l1_loss(const Tensor& x, const Tensor& y, Reduction reduction) {
  check_shapes("l1_loss", x, y);
  return reduced(abs(x - y), reduction);
}

Tensor huber_loss(const Tensor& x, const Tensor& y, double delta, Reduction reduction) {
  check_shapes("huber_loss", x, y);
  TESSERA_CHECK(delta > 0, "huber_loss: delta={} must be positive", delta);
  Tensor d = abs(x - y);
  return reduced(where(lt(d, delta), square(d) * 0.5, (d - 0.5 * delta) * delta), reduction);
}

Tensor smooth_l1_loss(const Tensor& x, const Tensor& y, double beta, Reduction reduction) {
  check_shapes("smooth_l1_loss", x, y);
  return huber_loss(x, y, beta, reduction) / beta;
}

Tensor binary_cross_entropy_with_logits(const Tensor& x, const Tensor& y, Reduction reduction,
                                        const Tensor& pos_weight) {
  check_shapes("binary_cross_entropy_with_logits", x, y);
  Tensor positive = y * logsigmoid(x);
  if (pos_weight.defined()) positive = positive * pos_weight;
  return reduced(-(positive + (1 - y) * logsigmoid(-x)), reduction);
}

}  // namespace tessera::nn
