// Ranks on a host whose loopback interface is down say so and end; they do not wait in silence.
#include <gtest/gtest.h>

#include <fstream>
#include <regex>
#include <string>

#include "tests/examples/command.h"

namespace tessera {
namespace {

TEST(TrainNoNetwork, IsNamedByEveryRankWithinTheTimeToJoin) {
  if (!std::ifstream(bin("train"))) GTEST_SKIP() << "no train in TESSERA_BIN";
  const std::string alone = "unshare --map-root-user --net ";
  if (run(alone + "true").status != 0)
    GTEST_SKIP() << "this system lets no test have a network of its own";
  const Outcome o =
      run(alone + bin("tlaunch") + " --nproc 2 --join-timeout 1 timeout 60 " + bin("train") +
          " --model mlp --data synthetic: --set in=4 --batch-size 4 --steps 1");
  EXPECT_EQ(o.status, 1) << o.output;
  for (const char* rank : {"0", "1"}) {
    const std::regex said("\\[rank" + std::string(rank) +
                          "\\] store: no server at 127\\.0\\.0\\.1:[0-9]+ within 1000 ms "
                          "\\(Network is unreachable\\)");
    EXPECT_TRUE(std::regex_search(o.output, said)) << rank << "\n" << o.output;
  }
}

}  // namespace
}  // namespace tessera
