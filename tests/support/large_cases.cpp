#include "tests/support/large_cases.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "core/autograd/autograd.h"
#include "core/ops/pointwise.h"
#include "core/ops/samples.h"
#include "core/ops/views.h"
#include "core/tensor/random.h"
#include "tests/support/in_parts.h"

namespace tessera::test {
namespace {

// Unit roundoff.
double roundoff(DType t) {
  return t == kF64 ? 0x1p-53 : t == kF32 ? 0x1p-24 : t == kF16 ? 0x1p-11 : 0x1p-8;
}

struct Worst {
  double error = 0;  // of the largest magnitude of what is wanted
  int64_t at = -1;
  double got = 0, want = 0;
};

// `want` and `got` are f64 of one shape, dense.
Worst worst_of(const Tensor& got_any, const Tensor& want_any) {
  const Tensor got = cast(got_any, kF64).contiguous(), want = cast(want_any, kF64).contiguous();
  const double *g = got.values<double>(), *w = want.values<double>();
  double scale = 0;
  for (int64_t i = 0; i < want.numel(); ++i)
    if (std::isfinite(w[i])) scale = std::max(scale, std::abs(w[i]));
  Worst worst;
  for (int64_t i = 0; i < want.numel(); ++i) {
    if (g[i] == w[i] || (std::isnan(g[i]) && std::isnan(w[i]))) continue;
    double error = std::isfinite(g[i] - w[i]) ? std::abs(g[i] - w[i]) / scale : INFINITY;
    if (error > worst.error) worst = {error, i, g[i], w[i]};
  }
  return worst;
}

// The weight of result k in the sum whose gradients are taken. It is made once, because a step that
// is recorded may not make values of its own.
const Tensor& weight(const Shape& shape, size_t k) {
  thread_local std::map<std::string, Tensor> made;
  Tensor& t = made[fmt::format("{} {}", k, to_string(shape))];
  if (!t.defined()) t = grid_values(shape, 1000 + k);
  return t;
}

}  // namespace

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
                   add_windows, add_linalg, add_updates})
    add(cases);
  return cases;
}

std::vector<Tensor> operands_in(const LargeCase& c, DType dtype) {
  std::vector<Tensor> in;
  for (const Tensor& t : c.in)
    in.push_back(is_floating(t.dtype()) && t.ndim() > 0 ? cast(t, dtype) : t);
  return in;
}

void seed(const LargeCase& c) {
  if (c.draws) manual_seed(7);
}

std::vector<Tensor> evaluate(const LargeCase& c, const std::vector<Tensor>& operands) {
  std::vector<Tensor> in, results;
  Tensors leaves, roots, weights;
  for (const Tensor& t : operands) {
    in.push_back(t.detach());
    if (c.gradients && is_floating(t.dtype()) && t.ndim() > 0)
      leaves.push_back(in.back().requires_grad_());
  }
  const std::vector<Tensor> out = c.f(in);
  for (size_t k = 0; k < out.size(); ++k) {
    results.push_back(out[k].detach());
    if (!out[k].requires_grad()) continue;
    roots.push_back(out[k]);
    weights.push_back(cast(weight(out[k].shape(), k), out[k].dtype()));
  }
  if (roots.empty()) return results;
  for (const Tensor& g : grad(roots, leaves, weights)) results.push_back(g);
  return results;
}

std::vector<Tensor> reference(const LargeCase& c, OpsMet* met) {
  InParts parts(c.part);
  seed(c);
  std::vector<Tensor> want = evaluate(c, operands_in(c, kF64));
  if (met) {
    met->large.insert(parts.large().begin(), parts.large().end());
    met->whole.insert(parts.whole().begin(), parts.whole().end());
  }
  return want;
}

// How far a result may be off, as a part of the largest magnitude in it.
//
// A sum of n terms of magnitude t, each addition rounded by at most u and independently of the
// others, is off by about u sqrt(n) times the size of its partial sums, which are no larger than a
// small multiple of sqrt(n) t as the terms have both signs: the result's own size (Higham, Mary
// 2019: with probability 1 - 2 exp(-l^2 / 2) the error is at most l sqrt(n) u relative to the sum
// of magnitudes, l = 4 here). Before and behind it stand a dozen operations: products, an
// exponential, a square root. A 16-bit result is computed in f32 and rounded once, which a call
// that is made of several ops does as often as it says; each rounding is half an ulp of a value
// that is no larger than the largest of the result, and gradients pass as many once more.
double tolerance(const LargeCase& c, DType t, bool gradient) {
  const bool low = t == kBF16 || t == kF16;
  const double wide = roundoff(low ? kF32 : t) * (16 + 4 * std::sqrt(double(c.length)));
  if (!low) return wide;
  return wide + roundoff(t) * (gradient ? 2 * c.roundings : c.roundings);
}

std::string difference(const LargeCase& c, DType dtype, const std::vector<Tensor>& got,
                       const std::vector<Tensor>& want) {
  if (got.size() != want.size())
    return fmt::format("{} results and gradients, not {}", got.size(), want.size());
  for (size_t k = 0; k < got.size(); ++k) {
    const std::string what = fmt::format("{}, result or gradient {}", name_of(dtype), k);
    if (got[k].defined() != want[k].defined()) return what + ": one is not defined";
    if (!want[k].defined()) continue;
    if (!(got[k].shape() == want[k].shape()))
      return fmt::format("{}: {}, not {}", what, to_string(got[k].shape()),
                         to_string(want[k].shape()));
    const double allowed = is_floating(want[k].dtype()) ? tolerance(c, dtype, k > 0) : 0;
    const Worst w = worst_of(got[k], want[k]);
    if (!(w.error <= allowed))
      return fmt::format(
          "{}, element {} of {}: {} instead of {}, off by {:.3g} of the largest; "
          "allowed is {:.3g}",
          what, w.at, to_string(want[k].shape()), w.got, w.want, w.error, allowed);
  }
  return "";
}

}  // namespace tessera::test
