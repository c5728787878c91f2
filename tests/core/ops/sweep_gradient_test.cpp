// Gradients of every op against central finite differences in f64, once and twice. The op runs
// under autograd, so the saved-values mask is tested too: what it leaves out has no values to read.
//
// Tolerances: a step of 1e-5 leaves a truncation error near 1e-10 and a rounding error near 1e-11
// per unit of the loss; both times the op's higher derivatives, for which 1e-6 relative leaves
// room.
#include <algorithm>
#include <cmath>

#include "core/autograd/autograd.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/views.h"
#include "tests/core/ops/sweep.h"

namespace tessera::sweep {
namespace {

constexpr double kStep = 1e-5, kTolerance = 1e-6;

// Sum of the float results, each element with a fixed weight; only the first result when
// `first_only`.
Tensor loss(const PrimRef& prim, const List& in, bool first_only) {
  Tensor total;
  List out = run(prim, in);
  for (size_t k = 0; k < (first_only ? 1 : out.size()); ++k) {
    if (!is_float(out[k])) continue;
    Tensor term = sum(cast(out[k], kF64) * cast(weights_like(out[k], k), kF64));
    total = total.defined() ? total + term : term;
  }
  return total;
}

List leaves(const List& in) {
  List out;
  for (const Tensor& t : in) {
    out.push_back(clone(t.detach()));
    if (t.dtype() == kF64) out.back().requires_grad_();
  }
  return out;
}

// Gradients of the loss by the float operands, undefined where there is none.
List gradients(const PrimRef& prim, const List& in, bool first_only, bool create_graph) {
  Tensor l = loss(prim, in, first_only);
  List wanted, result(in.size());
  for (const Tensor& t : in)
    if (t.requires_grad()) wanted.push_back(t);
  if (!l.defined() || !l.requires_grad()) return result;
  Tensors g = grad({&l, 1}, wanted, {}, {.create_graph = create_graph});
  size_t k = 0;
  for (size_t i = 0; i < in.size(); ++i)
    if (in[i].requires_grad()) result[i] = g[k++];
  return result;
}

// A fixed combination of all gradients: one number whose derivative is tested.
Tensor combined(const List& gradients) {
  Tensor total;
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined()) continue;
    Tensor term = sum(gradients[i] * weights_like(gradients[i], 50 + i));
    total = total.defined() ? total + term : term;
  }
  return total;
}

// True when results beyond the first have no derivative (the log-sum-exp of attention).
bool only_first_has_derivative(const Sample& s) {
  List in = leaves(s.in);
  try {
    gradients(s.prim, in, false, false);
    return false;
  } catch (const UserError&) {
    return true;
  }
}

// Compares `got` with differences of f at up to `most` elements of operand i.
void expect_gradient(const Sample& s, size_t i, const Tensor& got, int64_t most,
                     const std::function<double(const List&)>& f, const char* what) {
  const Tensor& x = s.in[i];
  int64_t stride = std::max<int64_t>(1, x.numel() / most);
  for (int64_t e = 0; e < x.numel(); e += stride) {
    List in = s.in;
    in[i] = nudged(x, e, kStep);
    double up = f(in);
    in[i] = nudged(x, e, -kStep);
    double difference = (up - f(in)) / (2 * kStep), g = got.defined() ? at(got, e) : 0;
    ASSERT_LE(std::abs(g - difference), kTolerance * std::max(1.0, std::abs(difference)))
        << what << " by operand " << i << ", element " << e << ": " << g << ", finite difference "
        << difference;
  }
}

bool tested(const Sample& s) {
  bool floats = false;
  for (const Tensor& t : s.in) floats = floats || t.dtype() == kF64;
  return s.smooth && s.prim->differentiable() && floats;
}

TEST(Sweep, GradientsEqualFiniteDifferences) {
  int samples = 0;
  for_each_sample([&](const Sample& s) {
    if (!tested(s)) return;
    bool first_only = only_first_has_derivative(s);
    List in = leaves(s.in), g = gradients(s.prim, in, first_only, false);
    auto f = [&](const List& at) {
      Tensor l = loss(s.prim, at, first_only);
      return l.defined() ? l.item<double>() : 0.0;
    };
    List out = run(s.prim, s.in);
    if (!is_float(out[0]) || out[0].dtype() != kF64) return;  // a cast to a coarser dtype has steps
    for (size_t i = 0; i < s.in.size(); ++i)
      if (s.in[i].dtype() == kF64) expect_gradient(s, i, g[i], 16, f, "gradient");
    ++samples;
  });
  EXPECT_GT(samples, 100);
}

TEST(Sweep, SecondDerivativesEqualFiniteDifferencesOfGradients) {
  int samples = 0;
  for_each_sample([&](const Sample& s) {
    if (!tested(s) || run(s.prim, s.in)[0].dtype() != kF64) return;
    bool first_only = only_first_has_derivative(s);
    List in = leaves(s.in), second(s.in.size());
    try {
      Tensor total = combined(gradients(s.prim, in, first_only, true));
      if (total.defined() && total.requires_grad()) {
        List wanted;
        for (const Tensor& t : in)
          if (t.requires_grad()) wanted.push_back(t);
        Tensors g = grad({&total, 1}, wanted);
        size_t k = 0;
        for (size_t i = 0; i < in.size(); ++i)
          if (in[i].requires_grad()) second[i] = g[k++];
      }
    } catch (const NotDifferentiable&) {
      return;  // it has none, and says so
    }
    auto f = [&](const List& at) {
      Tensor total = combined(gradients(s.prim, leaves(at), first_only, false));
      return total.defined() ? total.item<double>() : 0.0;
    };
    for (size_t i = 0; i < s.in.size(); ++i)
      if (s.in[i].dtype() == kF64) expect_gradient(s, i, second[i], 6, f, "second derivative");
    ++samples;
  });
  EXPECT_GT(samples, 100);
}

// A gradient may be asked of any subset of the operands.
TEST(Sweep, GradientOfOneOperandEqualsThatOfAll) {
  for_each_sample([](const Sample& s) {
    if (!tested(s)) return;
    bool first_only = only_first_has_derivative(s);
    List all = gradients(s.prim, leaves(s.in), first_only, false);
    for (size_t i = 0; i < s.in.size(); ++i) {
      if (s.in[i].dtype() != kF64 || !all[i].defined()) continue;
      List in;
      for (const Tensor& t : s.in) in.push_back(clone(t));
      in[i].requires_grad_();
      List one = gradients(s.prim, in, first_only, false);
      ASSERT_TRUE(one[i].defined()) << "operand " << i;
      expect_close(one[i], all[i], 1e-13, fmt::format("operand {} alone", i));
    }
  });
}

TEST(Sweep, RecordingDoesNotChangeResults) {
  for_each_sample([](const Sample& s) {
    expect_close(run(s.prim, leaves(s.in)), run(s.prim, s.in), 0, "recorded");
  });
}

}  // namespace
}  // namespace tessera::sweep
