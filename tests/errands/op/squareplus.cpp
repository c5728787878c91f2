// squareplus(x) = (x + sqrt(x^2 + 4)) / 2 (Barron 2021), floats of any shape.
#include "core/autograd/custom_op.h"
#include "core/ops/pointwise.h"

using namespace tessera;

Tensor squareplus(const Tensor& x) {
  static const auto op = elementwise(
      "squareplus", [](const Tensor& x) { return (x + sqrt(square(x) + 4.0)) * 0.5; },
      [](const Tensor& x, const Tensor& dy) {
        return dy * (x / sqrt(square(x) + 4.0) + 1.0) * 0.5;
      });
  return op(x);
}
