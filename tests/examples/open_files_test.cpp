// A limit of open files that is too low for train is reported, on one rank and on several.
#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include "tests/examples/command.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

TEST(TrainOpenFiles, AreEnoughOrSaidToBeTooFew) {
  if (!std::ifstream(bin("train"))) GTEST_SKIP() << "no train in TESSERA_BIN";
  TempFolder folder;
  std::string text;
  for (int i = 0; i < 300; ++i) text += "line " + std::to_string(i * i % 97) + " of a text\n";
  folder.write("text.txt", text);
  const std::string train = bin("train") + " --data text:" + (folder / "text.txt") +
                            " --set layers=1 --set dim=32 --set heads=2 --seq-len 16"
                            " --batch-size 4 --steps 2";
  const std::string launched = bin("tlaunch") + " --nproc 2 ";
  for (const std::string& start : {std::string(), launched, "TESSERA_BACKEND=gloo " + launched})
    for (int limit = 3; limit <= 32; ++limit) {
      const std::string command = start + "timeout 60 " + train;
      SCOPED_TRACE(std::to_string(limit) + ": " + command);
      const Outcome o = run("ulimit -Sn " + std::to_string(limit) + "; " + command);
      if (o.status == 0) continue;
      EXPECT_LT(limit, 32) << "is enough";
      EXPECT_TRUE(o.status == 1 || o.status == 127) << o.status << "\n" << o.output;
      const bool by_loader = o.output.find("error while loading shared libr") != std::string::npos;
      const std::string said =
          "too many open files: the limit is " + std::to_string(limit) + " (ulimit -n), and about";
      EXPECT_TRUE(by_loader ? limit <= 5 : o.output.find(said) != std::string::npos) << o.output;
    }
}

}  // namespace
}  // namespace tessera
