// Generated kernels at the extents where they cut their work, on three threads: values and
// gradients in f32 and bf16 against the same call in f64, computed in parts; and that each of their
// limits was crossed.
#include <gtest/gtest.h>

#include "compile/compile.h"
#include "core/base/boundary.h"
#include "tests/support/boundaries.h"
#include "tests/support/large_cases.h"

namespace tessera::compiler {
namespace {

using test::LargeCase;
using List = std::vector<Tensor>;

// All calls in one graph: a compiler run for each would take minutes.
void check(const std::vector<LargeCase>& all, const std::vector<List>& wanted, DType t) {
  std::vector<LargeCase> cases;
  std::vector<List> operands, want;
  for (size_t i = 0; i < all.size(); ++i) {
    if (size_of(t) == 2 && all[i].roundings == 0) continue;
    cases.push_back(all[i]), want.push_back(wanted[i]);
    operands.push_back(test::operands_in(all[i], t));
  }
  auto f = compile([&](const std::vector<List>& in) {
    std::vector<List> out;
    for (size_t i = 0; i < cases.size(); ++i) out.push_back(test::evaluate(cases[i], in[i]));
    return out;
  });
  for (int call = 0; call < 3; ++call) {
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

}  // namespace
}  // namespace tessera::compiler
