// Every pointwise op on enough elements for several threads, at lengths beside those of groups and
// blocks. Operands repeat the values of a sample, so results and gradients must repeat those of the
// sample.
#include <gtest/gtest.h>

#include <cmath>

#include "core/autograd/autograd.h"
#include "core/base/parallel.h"
#include "core/ops/create.h"
#include "core/ops/indexing.h"
#include "core/ops/pointwise.h"
#include "core/ops/views.h"
#include "tests/core/ops/sweep.h"
#include "tests/support/channels_last.h"

namespace tessera::sweep {
namespace {

// Elements i modulo n of the flat x.
Tensor repeated(const Tensor& x, int64_t length) {
  const int64_t n = x.numel();
  return index_select(reshape(x, {n}), 0, remainder(arange(0, length), scalar_tensor(n, kI64)));
}

// Results, then gradients of their sums.
List results_of(const Sample& s, const List& operands) {
  List in, out;
  Tensors leaves, roots;
  for (const Tensor& t : operands) {
    in.push_back(t.detach());
    if (is_float(t) && s.prim->differentiable()) leaves.push_back(in.back().requires_grad_());
  }
  for (const Tensor& t : run(s.prim, in)) {
    out.push_back(t.detach());
    if (t.requires_grad()) roots.push_back(t);
  }
  if (roots.empty()) return out;
  Tensors ones{ones_like(roots[0])};
  try {
    for (const Tensor& g : grad(roots, leaves, ones)) out.push_back(g);
  } catch (const NotDifferentiable&) {  // it has none, and says so
  }
  return out;
}

// Lengths cross four vectors of floats on every instruction set, a block of widened elements, and
// two grains of elements.
constexpr int64_t kLengths[] = {15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 511, 512, 513, 65537};

TEST(Large, PointwiseOpsRepeatTheirSamples) {
  const int before = num_threads();
  set_num_threads(3);
  int samples = 0;
  for_each_sample([&](const Sample& s) {
    if (!test::is_pointwise(s)) return;
    ++samples;
    for (DType t : {kF64, kF32, kBF16}) {
      const List in = with_dtype(s.in, t, false);
      List few;
      try {
        few = results_of(s, in);
      } catch (const UserError&) {
        EXPECT_NE(t, kF64);  // an op that refuses 16 bits, or f32
        continue;
      }
      // Groups of elements are computed by other instructions than single ones, whose roundings
      // differ: by a few units of the last place of f32 or f64, or of one rounding to bf16 more.
      const double tolerance = t == kF64 ? 0x1p-49 : t == kF32 ? 0x1p-20 : 0x1p-8;
      for (int64_t length : kLengths) {
        List many, want;
        for (const Tensor& x : in) many.push_back(repeated(x, length));
        for (const Tensor& x : few) want.push_back(x.defined() ? repeated(x, length) : x);
        const List got = results_of(s, many);
        ASSERT_EQ(got.size(), want.size());
        for (size_t k = 0; k < got.size(); ++k)
          if (want[k].defined())
            expect_close(
                got[k], want[k], tolerance,
                fmt::format("{} elements in {}, result or gradient {}", length, name_of(t), k));
      }
    }
  });
  EXPECT_GT(samples, 100);
  set_num_threads(before);
}

}  // namespace
}  // namespace tessera::sweep
