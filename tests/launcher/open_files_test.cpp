// A limit of open files that is too low is reported, whatever it is; nothing hangs or crashes.
#include <gtest/gtest.h>

#include "tests/launcher/command.h"

namespace tessera::testing {
namespace {

// At 3 the dynamic loader reports it.
TEST(OpenFiles, AreEnoughOrSaidToBeTooFew) {
  for (const char* flag : {"-n", "-Sn"})
    for (int limit = 3; limit <= 32; ++limit) {
      // What this process has inherited, from ctest for one, would count too.
      const std::string set = "exec 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&-; ulimit " +
                              std::string(flag) + " " + std::to_string(limit) + "; ";
      const Result r = Command({"sh", "-c", set + "exec \"$0\" \"$@\"", tlaunch_argv({})[0],
                                "--nproc", "2", "sh", "-c", "echo $RANK"})
                           .finish();
      SCOPED_TRACE(set + r.err);
      if (r.exit_code == 0) {
        EXPECT_NE(r.out.find("[rank1] 1\n"), std::string::npos) << r.out;
        continue;
      }
      const std::string said = "tlaunch: --nproc 2: too many open files: the limit is " +
                               std::to_string(limit) + " (ulimit -n), and about 3";
      const bool by_loader = r.err.find("cannot open shared object file") != std::string::npos;
      EXPECT_EQ(r.exit_code, by_loader ? 127 : 2);
      EXPECT_TRUE(by_loader ? limit == 3 : r.err.starts_with(said));
      EXPECT_LT(limit, 32) << "is enough";
    }
}

}  // namespace
}  // namespace tessera::testing
