// Ops at the extents where kernels cut their work, on three threads: values and gradients in f64,
// f32, bf16 and f16 against the same call in f64, computed in parts that no kernel cuts
// (tests/support/in_parts.h). And that every limit was crossed by a case.
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "core/base/boundary.h"
#include "core/base/isa.h"
#include "core/ops/pointwise.h"
#include "core/ops/views.h"
#include "tests/core/ops/sweep.h"
#include "tests/support/in_parts.h"
#include "tests/support/large_cases.h"
#include "tests/support/loops.h"

namespace tessera::sweep {
namespace {

using test::LargeCase;

// Unit roundoff.
double roundoff(DType t) {
  return t == kF64 ? 0x1p-53 : t == kF32 ? 0x1p-24 : t == kF16 ? 0x1p-11 : 0x1p-8;
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

class Threads {
 public:
  explicit Threads(int n) : before_(num_threads()) { set_num_threads(n); }
  ~Threads() { set_num_threads(before_); }

 private:
  int before_;
};

void compare(const LargeCase& c, DType t, const List& want) {
  List got;
  {
    CountBoundaries counting;
    got = test::evaluate(c, t);
  }
  ASSERT_EQ(got.size(), want.size());
  const size_t results = got.size();
  for (size_t k = 0; k < results; ++k) {
    ASSERT_EQ(got[k].defined(), want[k].defined()) << "result " << k;
    if (!want[k].defined()) continue;
    ASSERT_EQ(got[k].shape(), want[k].shape()) << "result " << k;
    const bool gradient = k > 0;
    const double allowed = is_float(want[k]) ? tolerance(c, t, gradient) : 0;
    const Worst w = worst_of(got[k], want[k]);
    EXPECT_LE(w.error, allowed) << name_of(t) << ", " << (k ? "result or gradient " : "result ")
                                << k << ", element " << w.at << " of " << to_string(want[k].shape())
                                << ": " << w.got << " instead of " << w.want;
  }
}

// `computed_whole`: ops with a dim that nothing cuts. Their other dims are cut, and along this one
// their kernels cut nothing either: they scan it, sort it, place by it, slide over it.
void sweep(void (*add)(test::LargeCases&), const std::set<std::string>& computed_whole = {}) {
  Threads three(3);
  test::LargeCases cases;
  add(cases);
  std::set<std::string> names, whole;
  for (const LargeCase& c : cases) {
    SCOPED_TRACE(c.name);
    EXPECT_TRUE(names.insert(c.name).second) << "two cases have this name";
    List want;
    {
      test::InParts parts(c.part);
      want = test::evaluate(c, kF64);
      whole.insert(parts.whole().begin(), parts.whole().end());
    }
    for (DType t : {kF64, kF32, kBF16, kF16})
      if (t == kF64 || t == kF32 || c.roundings > 0) compare(c, t, want);
  }
  EXPECT_EQ(whole, computed_whole) << "the reference has no other way to compute these";
}

TEST(Large, Reductions) { sweep(test::add_reductions, {"cumprod", "gather"}); }
TEST(Large, Rows) { sweep(test::add_rows, {"gather", "scatter_sum"}); }
TEST(Large, Attention) { sweep(test::add_attention); }
TEST(Large, Products) { sweep(test::add_products); }
TEST(Large, Elementwise) {
  sweep(test::add_elementwise, {"argmax", "cumsum", "gather", "scatter_sum", "sort", "unslice"});
}
TEST(Large, Windows) {
  sweep(test::add_windows, {"avg_pool", "avg_pool_grad", "max_pool", "max_pool_grad"});
}
TEST(Large, Updates) { sweep(test::add_updates); }

// A rank draws for its part of a tensor; its rows are not neighbours in the whole.
TEST(Large, PartsOfDropout) {
  Threads three(3);
  Sample drop;
  for (const OpEntry& e : op_registry().entries())
    if (e.name == "dropout") drop = e.samples()[0];
  for (int64_t rows : {31, 32, 33}) {
    const Tensor x = test::grid_values({rows, 1100}, 1, 0.5, 1), part = narrow(x, 1, 37, 1024);
    const AxisMap map = axes(*drop.prim, {x, drop.in[1]});
    const PrimRef local =
        drop.prim->localize(map, test::loops_with(map, map.out[0][1][0], {37, 1024, 1100}));
    CountBoundaries counting;
    for (DType t : {kF32, kF64}) {
      const Tensor whole = run(drop.prim, {cast(x, t), drop.in[1]})[0];
      expect_close(run(local, {cast(part, t), drop.in[1]})[0], narrow(whole, 1, 37, 1024), 0,
                   fmt::format("{} rows in {}", rows, name_of(t)));
    }
  }
}

bool has(Needs needs) {
  if (needs == Needs::kBf16Dot) return cpu::has_bf16_dot();
  return needs == Needs::kAnyCpu || cpu::current_isa() == cpu::Isa::kV4;
}

// The last of the sweep: it counts what the others met.
TEST(Large, ZEveryBoundaryIsMetFromBothSides) {
  for (int i = 0; i < kNumBoundaries; ++i) {
    if (!has(kBoundaries[i].needs)) continue;
    const uint8_t met = boundary_met(i);
    EXPECT_EQ(met, 7) << kBoundaries[i].name << ", limit " << kBoundaries[i].limit << ": "
                      << (met & 1 ? "" : "no case is one short of it; ")
                      << (met & 2 ? "" : "none is at it; ")
                      << (met & 4 ? "" : "none is one beyond it");
  }
}

}  // namespace
}  // namespace tessera::sweep
