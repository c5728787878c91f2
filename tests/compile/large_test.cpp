// Generated kernels at the extents where they divide their work, on three threads: values and
// gradients in f32 and bf16 are compared with the same call in f64, computed in parts; and each of
// the limits is crossed.
#include <gtest/gtest.h>

#include "compile/compile.h"
#include "core/base/boundary.h"
#include "core/ops/pointwise.h"
#include "core/ops/reduce.h"
#include "core/ops/update.h"
#include "core/optim/optim.h"
#include "tests/compile/bits.h"
#include "tests/support/boundaries.h"
#include "tests/support/large_cases.h"

namespace tessera::compiler {
namespace {

using test::LargeCase;
using List = std::vector<Tensor>;

// Runs all calls in one graph, except those that draw: a compiler run for each would take minutes.
void check(const std::vector<LargeCase>& all, const std::vector<List>& wanted, DType t) {
  std::vector<LargeCase> cases;
  std::vector<List> operands, want;
  for (size_t i = 0; i < all.size(); ++i) {
    if (size_of(t) == 2 && all[i].roundings == 0) continue;
    if (all[i].draws && all.size() > 1) {
      check({all[i]}, {wanted[i]}, t);
      continue;
    }
    cases.push_back(all[i]), want.push_back(wanted[i]);
    operands.push_back(test::operands_in(all[i], t));
  }
  if (cases.empty()) return;
  auto f = compile([&](const std::vector<List>& in) {
    std::vector<List> out;
    for (size_t i = 0; i < cases.size(); ++i) out.push_back(test::evaluate(cases[i], in[i]));
    return out;
  });
  for (int call = 0; call < 3; ++call) {
    test::seed(cases.front());
    const std::vector<List> got = f(operands);
    for (size_t i = 0; i < cases.size(); ++i)
      EXPECT_EQ(test::difference(cases[i], t, got[i], want[i]), "")
          << cases[i].name << ", call " << call;
  }
  EXPECT_EQ(f.report().replays, 1) << f.report().why_not;
}

TEST(CompileLarge, GeneratedKernelsAtTheirLimits) {
  const int before = num_threads();
  set_num_threads(3);
  std::vector<LargeCase> cases;
  test::add_generated(cases);
  std::vector<List> want;
  for (const LargeCase& c : cases) want.push_back(test::reference(c));
  {
    CountBoundaries counting;
    for (DType t : {kF32, kBF16}) check(cases, want, t);
  }
  EXPECT_EQ(test::not_met({"generated", "accumulate"}), "");
  set_num_threads(before);
}

// Ops that are fused, decomposed, called or joined in place, at the extents where the kernels of
// eager mode divide their work.
struct Family {
  const char* name;
  void (*add)(test::LargeCases&);
  std::vector<DType> dtypes = {kF32, kBF16};
};
class CompileLargeFamily : public testing::TestWithParam<Family> {};

TEST_P(CompileLargeFamily, EqualsTheReference) {
  const int before = num_threads();
  set_num_threads(3);
  std::vector<LargeCase> cases;
  GetParam().add(cases);
  constexpr size_t kAtOnce = 40;
  for (size_t first = 0; first < cases.size(); first += kAtOnce) {
    const auto begin = cases.begin() + std::ptrdiff_t(first);
    const std::vector<LargeCase> some(
        begin, begin + std::ptrdiff_t(std::min(kAtOnce, cases.size() - first)));
    std::vector<List> want;
    for (const LargeCase& c : some) want.push_back(test::reference(c));
    for (DType t : GetParam().dtypes) check(some, want, t);
  }
  set_num_threads(before);
}
const Family families[] = {{"rows", test::add_rows},
                           {"attention", test::add_attention},
                           {"reductions", test::add_reductions},
                           {"products", test::add_products},
                           {"elementwise", test::add_elementwise},
                           {"linalg", test::add_linalg},
                           {"updates", test::add_updates, {kF32}},
                           {"windows", test::add_windows},
                           {"convolutions_in_f32", test::add_f32_convolutions, {kF32}},
                           {"convolutions_in_bf16", test::add_bf16_convolutions, {kBF16}}};
INSTANTIATE_TEST_SUITE_P(Sweep, CompileLargeFamily, testing::ValuesIn(families),
                         [](const auto& info) { return std::string(info.param.name); });

// The update has more elements than one that compile turns into generated kernels.
TEST(CompileLarge, AnUpdateOfManyElements) {
  const int64_t n = (int64_t(1) << 23) + 1;
  const Tensor start = test::grid_values({n}, 1), slope = test::grid_values({n}, 2);
  auto train = [&](bool compiled) {
    Tensor w = start.to(kF32).requires_grad_();
    const Tensor x = slope.to(kF32);
    optim::AdamW opt(std::vector<Tensor>{w}, optim::AdamWOptions{.lr = 0.01, .weight_decay = 0.1});
    auto step = [&](const Tensor& x) {
      opt.zero_grad();
      sum(w * x * w).backward();
      opt.step();
    };
    auto fast = compile(step);
    for (int i = 0; i < 4; ++i) compiled ? fast(x) : step(x);
    EXPECT_EQ(fast.report().replays, compiled ? 2 : 0) << fast.report().why_not;
    return w.detach();
  };
  test::expect_same_bits(train(true), train(false), "weights after four steps");
}

}  // namespace
}  // namespace tessera::compiler
