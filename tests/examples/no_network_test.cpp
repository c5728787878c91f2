// Ranks on a host whose loopback interface is down say so and end; they do not wait in silence.
#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include "tests/examples/command.h"

namespace tessera {
namespace {

TEST(TrainNoNetwork, IsNamedByEveryRankWithinTheTimeToJoin) {
  if (!std::ifstream(bin("train"))) GTEST_SKIP() << "no train in TESSERA_BIN";
  const Outcome o = run("unshare --map-root-user --net " + bin("tlaunch") +
                        " --nproc 2 --join-timeout 1 timeout 60 " + bin("train") +
                        " --model mlp --data synthetic: --set in=4 --batch-size 4 --steps 1");
  if (o.output.find("unshare failed") != std::string::npos)
    GTEST_SKIP() << "this system lets no test have a network of its own: " << o.output;
  EXPECT_EQ(o.status, 1) << o.output;
  for (const char* part : {"[rank0] store: no server at 127.0.0.1:", "[rank1] store: no server at",
                           "within 1000 ms (Network is unreachable)"})
    EXPECT_NE(o.output.find(part), std::string::npos) << part << "\n" << o.output;
}

}  // namespace
}  // namespace tessera
