// bench --only: a name that nothing has is told before anything is measured, with those there are.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/examples/command.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

TEST(BenchOnly, ANameThatNothingHasIsToldAtOnceWithThoseThereAre) {
  struct Command {
    const char *name, *one, *another;
  };
  for (auto [name, one, another] :
       {Command{"ops", "mul_number over", "softmax [64, 1024]"},
        Command{"collectives", "barrier", "reduce_scatter"},
        Command{"kernels", "softmax [rows, 1024]", "masked_softmax [rows, 1024]"}}) {
    const Outcome o = run(bin("bench") + " " + name + " --only no-such-name");
    EXPECT_EQ(o.status, 1) << o.output;
    EXPECT_TRUE(o.output.starts_with("bench " + std::string(name) + ": --only no-such-name: "))
        << o.output;
    EXPECT_EQ(std::count(o.output.begin(), o.output.end(), '\n'), 1) << o.output;
    expect_contains(o.output, one);
    expect_contains(o.output, another);
  }
}

}  // namespace
}  // namespace tessera
