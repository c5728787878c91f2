// Ops at the extents where kernels cut their work, on three threads: values and gradients in f64,
// f32, bf16 and f16 against the same call in f64, computed in parts that no kernel cuts
// (tests/support/in_parts.h). And that every limit was crossed by a case, and every op called by
// one.
#include <gtest/gtest.h>

#include <cstring>
#include <set>

#include "core/autograd/autograd.h"
#include "core/base/boundary.h"
#include "core/ops/create.h"
#include "core/ops/losses.h"
#include "core/ops/pointwise.h"
#include "core/ops/samples.h"
#include "core/ops/views.h"
#include "tests/core/ops/sweep.h"
#include "tests/support/boundaries.h"
#include "tests/support/channels_last.h"
#include "tests/support/guarded_kernels.h"
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

int sweeps = 0;             // that were run
std::set<std::string> met;  // ops that were called with more than 1,000 elements, and compared

// Results may come to lie where equal ones lay: what a kernel leaves out must not be right by that.
void soil_memory(const List& results, DType t) {
  List taken;
  for (const Tensor& r : results) {
    if (!r.defined()) continue;
    for (DType type : {t, is_floating(r.dtype()) ? kF32 : r.dtype()})
      for (int k = 0; k < 3; ++k) {
        taken.push_back(empty(r.shape(), type));
        std::memset(taken.back().raw(), 0x7f, taken.back().nbytes());
      }
  }
}

// `computed_whole`: ops with a dim that nothing cuts. Their other dims are cut, and along this one
// their kernels cut nothing either: they scan it, sort it, place by it, slide over it. The
// reference has one thread.
void sweep(void (*add)(test::LargeCases&), const std::set<std::string>& computed_whole = {},
           const std::vector<DType>& dtypes = {kF64, kF32, kBF16, kF16}) {
  ++sweeps;
  test::LargeCases cases;
  add(cases);
  std::set<std::string> names, whole;
  for (const LargeCase& c : cases) {
    SCOPED_TRACE(c.name);
    EXPECT_TRUE(names.insert(c.name).second) << "two cases have this name";
    test::OpsMet ops;
    const List want = [&] {
      Threads one(1);
      return test::reference(c, &ops);
    }();
    Threads threads(c.threads);
    for (DType t : dtypes) {
      if (size_of(t) == 2 && c.roundings == 0) continue;
      CountBoundaries counting;
      soil_memory(want, t);
      test::seed(c);
      EXPECT_EQ(test::difference(c, t, test::evaluate(c, test::operands_in(c, t)), want), "");
      met.insert(ops.large.begin(), ops.large.end());
    }
    whole.merge(ops.whole);
  }
  EXPECT_EQ(whole, computed_whole) << "the reference has no other way to compute these";
}

TEST(Large, Reductions) { sweep(test::add_reductions, {"bits_hash", "cumprod", "gather"}); }
TEST(Large, Rows) { sweep(test::add_rows, {"gather", "scatter_sum"}); }
TEST(Large, Attention) { sweep(test::add_attention); }
TEST(Large, Products) { sweep(test::add_products); }
TEST(Large, Elementwise) {
  sweep(test::add_elementwise,
        {"argmax", "argmin", "cummax", "cummin", "cumsum", "gather", "linear_scan", "logcumsumexp",
         "scatter", "scatter_amax", "scatter_amin", "scatter_prod", "scatter_sum", "searchsorted",
         "sort", "unslice"});
}
TEST(Large, Windows) {
  sweep(test::add_windows, {"avg_pool", "avg_pool_grad", "max_pool", "max_pool_grad"});
}
// In f64 a plain loop nest computes them.
const std::set<std::string> convolutions = {"conv", "conv_grad_input", "conv_grad_weight"};
TEST(Large, ConvolutionsInF32) { sweep(test::add_f32_convolutions, convolutions, {kF32}); }
TEST(Large, ConvolutionsInBf16) { sweep(test::add_bf16_convolutions, convolutions, {kBF16}); }
// What libraries may compute.
TEST(Large, ProductsAndConvolutionsWriteToTheirScratchAndResultsAlone) {
  Threads three(3);
  const auto run = [](void (*add)(test::LargeCases&), DType t) {
    test::LargeCases cases;
    add(cases);
    const test::GuardedKernels guarded;
    for (const LargeCase& c : cases) {
      SCOPED_TRACE(c.name);
      if (c.roundings > 0 || t == kF32) test::evaluate(c, test::operands_in(c, t));
    }
  };
  for (DType t : {kF32, kBF16}) run(test::add_products, t);
  run(test::add_f32_convolutions, kF32);
  run(test::add_bf16_convolutions, kBF16);
}
TEST(Large, Linalg) {
  sweep(test::add_linalg,
        {"cholesky", "csr_transpose", "gather", "qr", "quantized_max_pool", "scatter_sum", "sddmm",
         "searchsorted", "segment_amax", "segment_amin", "segment_prod", "segment_sum",
         "solve_triangular", "spmm", "spmm_amax", "spmm_amin", "svd"},
        {kF32, kBF16});
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

// Gradients of operands that are far larger than the caches are stored past these: bits are those
// of both halves, which are not.
TEST(Large, CrossEntropyBeyondTheCaches) {
  Threads three(3);
  const int64_t most = 257 * 65281;  // 2^24 + 1
  Tensor all = empty({most}, kF32);
  for (int64_t i = 0; i < most; ++i)
    all.data<float>()[i] = float(uint32_t(i) * 2654435761u >> 22) / 128 - 4;
  const auto gradient = [](const Tensor& x, const Tensor& targets) {
    const Tensor leaf = x.detach().requires_grad_();
    const Tensors loss{cross_entropy(leaf, targets, {.reduction = Reduction::kSum})}, by{leaf};
    return grad(loss, by)[0];
  };
  for (auto [rows, n] : {std::pair<int64_t, int64_t>{4095, 4097}, {4096, 4096}, {257, 65281}}) {
    const Tensor x = reshape(narrow(all, 0, 0, rows * n), {rows, n}),
                 targets = sample_integers({rows}, 0, n, 1);
    CountBoundaries counting;
    const Tensor whole = gradient(x, targets);
    for (auto [first, count] : {std::pair{int64_t(0), rows / 2}, {rows / 2, rows - rows / 2}}) {
      const Tensor half = gradient(narrow(x, 0, first, count), narrow(targets, 0, first, count));
      EXPECT_EQ(std::memcmp(half.values<float>(), whole.values<float>() + first * n, half.nbytes()),
                0)
          << rows << " x " << n << ", rows from " << first << " on";
    }
  }
}

// The last two look at what all others met.
TEST(Large, ZEveryBoundaryIsMetFromBothSides) {
  if (sweeps < 11) GTEST_SKIP() << "only part of the sweep was run";
  EXPECT_EQ(test::not_met(), "");
}

TEST(Large, ZEveryOpIsMetAtARealSize) {
  if (sweeps < 11) GTEST_SKIP() << "only part of the sweep was run";
  // Pointwise ops repeat their samples (sweep_large_pointwise_test.cpp).
  for_each_sample([](const Sample& s) {
    if (test::is_pointwise(s)) met.emplace(s.prim->name());
  });
  std::string missing;
  for_each_sample([&](const Sample& s) {
    if (s.in.empty() || s.prim->is_view()) return;
    if (met.emplace(s.prim->name()).second) missing += " " + std::string(s.prim->name());
  });
  EXPECT_EQ(missing, "") << "tests/support/large_*.cpp: add a case of more than 1,000 elements";
}

}  // namespace
}  // namespace tessera::sweep
