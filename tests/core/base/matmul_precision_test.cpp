#include "core/base/matmul_precision.h"

#include <gtest/gtest.h>

#include "core/base/error.h"

namespace tessera {
namespace {

TEST(MatmulPrecision, IsHighestUntilAProgramAllowsLess) {
  EXPECT_EQ(float32_matmul_precision(), MatmulPrecision::kHighest);
  set_float32_matmul_precision("high");
  EXPECT_EQ(float32_matmul_precision(), MatmulPrecision::kHigh);
  set_float32_matmul_precision("highest");
  EXPECT_EQ(float32_matmul_precision(), MatmulPrecision::kHighest);
}
TEST(MatmulPrecision, HasTwoNames) {
  try {
    set_float32_matmul_precision("medium");
    FAIL();
  } catch (const UserError& e) {
    EXPECT_STREQ(
        e.what(),
        "set_float32_matmul_precision: unknown precision \"medium\"; expected highest or high");
  }
  EXPECT_EQ(float32_matmul_precision(), MatmulPrecision::kHighest);
}

}  // namespace
}  // namespace tessera
