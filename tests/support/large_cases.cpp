#include "tests/support/large_cases.h"

#include <algorithm>
#include <cmath>

#include "core/autograd/autograd.h"
#include "core/ops/pointwise.h"
#include "core/ops/samples.h"

namespace tessera::test {

Tensor grid_values(const Shape& shape, uint64_t key, double low, double high) {
  Tensor t = sample_values(shape, low, high, key);
  double* p = t.data<double>();
  double step = 0x1p-7;
  while (step * 128 < std::max(-low, high)) step *= 2;
  for (int64_t i = 0; i < t.numel(); ++i) p[i] = std::floor(p[i] / step) * step;
  return t;
}

std::vector<LargeCase> large_cases() {
  LargeCases cases;
  for (auto add : {add_reductions, add_rows, add_attention, add_products, add_elementwise,
                   add_windows, add_updates})
    add(cases);
  return cases;
}

std::vector<Tensor> evaluate(const LargeCase& c, DType dtype) {
  std::vector<Tensor> in, results;
  Tensors leaves;
  for (const Tensor& t : c.in) {
    const bool real = is_floating(t.dtype()) && t.ndim() > 0;  // numbers stay f64
    in.push_back(real ? cast(t, dtype).detach() : t);
    if (real && c.gradients) leaves.push_back(in.back().requires_grad_());
  }
  const std::vector<Tensor> out = c.f(in);
  Tensors roots, weights;
  for (size_t k = 0; k < out.size(); ++k) {
    results.push_back(is_floating(out[k].dtype()) ? cast(out[k].detach(), kF64) : out[k]);
    if (!out[k].requires_grad()) continue;
    roots.push_back(out[k]);
    weights.push_back(cast(grid_values(out[k].shape(), 1000 + k), out[k].dtype()));
  }
  if (roots.empty()) return results;
  for (const Tensor& g : grad(roots, leaves, weights))
    results.push_back(g.defined() ? cast(g, kF64) : Tensor());
  return results;
}

}  // namespace tessera::test
