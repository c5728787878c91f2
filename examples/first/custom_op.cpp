// An op with a derivative of its own. The derivative of rounding to a grid is 0 nearly everywhere;
// backward uses that of the identity instead (Bengio et al. 2013), so that weights of four bits can
// be learned. The exit status is 0 when they are, with gradients that grad, vmap and compile agree
// on.
#include <tessera/tessera.h>

#include <cstdio>

using namespace tessera;

// x rounded to a multiple of `step` between -8 and 7 steps.
const auto fake_quantize = elementwise(
    "fake_quantize",
    [](const Tensor& x, double step) { return (x / step).round().clamp(-8, 7) * step; },
    [](const Tensor& x, double step, const Tensor& dy) {
      return where(x.abs() <= 8 * step, dy, 0.0);
    });

int main() {
  manual_seed(0);
  auto loss = [](const Tensor& w, const Tensor& x, const Tensor& y) {
    return (matmul(x, fake_quantize(w, 0.25)) - y).square().mean();
  };
  auto gradient = compile(grad(loss));
  Tensor secret = randint(-8, 8, {16}) * 0.25, w = zeros({16});
  for (int step = 0; step < 200; ++step) {
    Tensor x = randn({64, 16});
    w -= gradient(w, x, matmul(x, secret)) * 0.1;
  }
  const bool learned = equal(fake_quantize(w, 0.25), secret);
  std::printf("weights %s, %ld of %ld steps replayed\n", learned ? "learned" : "not learned",
              long(gradient.report().replays), long(gradient.report().calls));

  Tensor x = randn({64, 16}), y = randn({64}), dw = grad(loss)(w, x, y);
  auto of_each = vmap(grad(loss), {.in_dims = {std::nullopt, 0, 0}});  // a gradient per sample
  const bool agree = allclose(of_each(w, x, y).mean(0), dw) && allclose(gradient(w, x, y), dw);
  std::printf("gradients %s\n", agree ? "agree" : "differ");
  return learned && agree && gradient.report().replays > 0 ? 0 : 1;
}
