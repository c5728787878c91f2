// Ops at the extents where kernels cut their work, on three threads: values and gradients in f64,
// f32, bf16 and f16 against the same call in f64, computed in parts that no kernel cuts
// (tests/support/in_parts.h). And that every limit was crossed by a case.
#include <gtest/gtest.h>

#include <set>

#include "core/base/boundary.h"
#include "core/base/isa.h"
#include "core/ops/pointwise.h"
#include "core/ops/views.h"
#include "tests/core/ops/sweep.h"
#include "tests/support/large_cases.h"
#include "tests/support/loops.h"

namespace tessera::sweep {
namespace {

using test::LargeCase;

class Threads {
 public:
  explicit Threads(int n) : before_(num_threads()) { set_num_threads(n); }
  ~Threads() { set_num_threads(before_); }

 private:
  int before_;
};

int sweeps = 0;  // that were run

// `computed_whole`: ops with a dim that nothing cuts. Their other dims are cut, and along this one
// their kernels cut nothing either: they scan it, sort it, place by it, slide over it.
void sweep(void (*add)(test::LargeCases&), const std::set<std::string>& computed_whole = {}) {
  ++sweeps;
  Threads three(3);
  test::LargeCases cases;
  add(cases);
  std::set<std::string> names, whole;
  for (const LargeCase& c : cases) {
    SCOPED_TRACE(c.name);
    EXPECT_TRUE(names.insert(c.name).second) << "two cases have this name";
    const List want = test::reference(c, &whole);
    for (DType t : {kF64, kF32, kBF16, kF16}) {
      if (size_of(t) == 2 && c.roundings == 0) continue;
      CountBoundaries counting;
      EXPECT_EQ(test::difference(c, t, test::evaluate(c, test::operands_in(c, t)), want), "");
    }
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
TEST(Large, WhatCompileFuses) { sweep(test::add_generated); }

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

// Of kernels that compile makes: tests/compile/large_test.cpp.
bool is_generated(int i) { return std::string_view(kBoundaries[i].name).starts_with("generated."); }

// The last of the sweep: it counts what the others met.
TEST(Large, ZEveryBoundaryIsMetFromBothSides) {
  if (sweeps < 8) GTEST_SKIP() << "only part of the sweep was run";
  for (int i = 0; i < kNumBoundaries; ++i) {
    if (!has(kBoundaries[i].needs) || is_generated(i)) continue;
    const uint8_t met = boundary_met(i);
    EXPECT_EQ(met, 7) << kBoundaries[i].name << ", limit " << kBoundaries[i].limit << ": "
                      << (met & 1 ? "" : "no case is one short of it; ")
                      << (met & 2 ? "" : "none is at it; ")
                      << (met & 4 ? "" : "none is one beyond it");
  }
}

}  // namespace
}  // namespace tessera::sweep
