// Generated kernels at the extents where they cut their work, on three threads: values and
// gradients in f32 and bf16 against the same call in f64, computed in parts; and that each of their
// limits was crossed.
#include <gtest/gtest.h>

#include "compile/compile.h"
#include "core/base/boundary.h"
#include "tests/support/large_cases.h"

namespace tessera::compiler {
namespace {

using test::LargeCase;
using List = std::vector<Tensor>;

// All calls in one graph: a compiler run for each would take minutes.
void check(const std::vector<LargeCase>& cases, const std::vector<List>& want, DType t) {
  std::vector<List> operands;
  for (const LargeCase& c : cases) operands.push_back(test::operands_in(c, t));
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
  for (int i = 0; i < kNumBoundaries; ++i) {
    const std::string_view name = kBoundaries[i].name;
    if (!name.starts_with("generated.")) continue;
    EXPECT_EQ(boundary_met(i), 7) << name << ", limit " << kBoundaries[i].limit
                                  << ": bits of one short of it, it, one beyond it";
  }
  set_num_threads(before);
}

}  // namespace
}  // namespace tessera::compiler
