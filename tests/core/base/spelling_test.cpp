#include "core/base/spelling.h"

#include <gtest/gtest.h>

#include <vector>

namespace tessera {
namespace {

TEST(Spelling, TheFewestChangesWin) {
  const std::vector<std::string> flags{"--step", "--steps", "--schedule", "--seed"};
  EXPECT_EQ(nearest_word("--stpes", flags), "--steps");  // two letters swapped are one change
  EXPECT_EQ(nearest_word("--scedule", flags), "--schedule");
  EXPECT_EQ(nearest_word("--seeed", flags), "--seed");
  EXPECT_EQ(nearest_word("--sted", flags), "--step");
}

TEST(Spelling, AWordThatIsFarFromAllHasNone) {
  const std::vector<std::string> flags{"--steps", "--seed"};
  EXPECT_EQ(nearest_word("--nesterov", flags), "");
  EXPECT_EQ(nearest_word("", flags), "");
  EXPECT_EQ(nearest_word("--seed", {}), "");
}

TEST(Spelling, OneOfAThingIsSingular) {
  EXPECT_EQ(counted(1, "rank"), "1 rank");
  EXPECT_EQ(counted(0, "rank"), "0 ranks");
  EXPECT_EQ(counted(4, "rank"), "4 ranks");
}

}  // namespace
}  // namespace tessera
