// What is read of Slurm's variables.
#include "launcher/agents/slurm.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>

#include "core/base/error.h"

namespace tessera::launcher {
namespace {

using Names = std::vector<std::string>;

TEST(Slurm, ListsOfHosts) {
  EXPECT_EQ(slurm_hosts("node0"), (Names{"node0"}));
  EXPECT_EQ(slurm_hosts("node[0-2]"), (Names{"node0", "node1", "node2"}));
  EXPECT_EQ(slurm_hosts("n[08-10,12]-ib,login,g[3]"),
            (Names{"n08-ib", "n09-ib", "n10-ib", "n12-ib", "login", "g3"}));
  for (const char* bad : {"", "n[", "n]", "n[0-1", "n[1-0]", "n[a]", "n[0-1],,m", "n[0][1]",
                          "n[0-99999999]", "n[-1]", "n[]", "n[1,]"})
    EXPECT_THROW(slurm_hosts(bad), UserError) << bad;
}

class SlurmSteps : public ::testing::Test {
 protected:
  void SetUp() override { set(kStep); }
  void TearDown() override {
    for (const auto& [name, value] : kStep) ::unsetenv(name.c_str());
  }
  static void set(const std::map<std::string, std::string>& variables) {
    for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
  }
  const std::map<std::string, std::string> kStep = {{"SLURM_JOB_ID", "12"},
                                                    {"SLURM_STEP_ID", "3"},
                                                    {"SLURM_PROCID", "1"},
                                                    {"SLURM_STEP_NUM_TASKS", "2"},
                                                    {"SLURM_STEP_NUM_NODES", "2"},
                                                    {"SLURM_NODEID", "1"},
                                                    {"SLURM_STEP_NODELIST", "a[1-2]"},
                                                    {"SLURMD_NODENAME", "a2"}};
};

TEST_F(SlurmSteps, AreRead) {
  const auto step = slurm_step();
  ASSERT_TRUE(step);
  EXPECT_EQ(step->nodes, 2);
  EXPECT_EQ(step->node, 1);
  EXPECT_EQ(step->tasks, 2);
  EXPECT_EQ(step->hosts, (Names{"a1", "a2"}));
  EXPECT_EQ(step->id, "12.3");
}

// A batch script has SLURM_PROCID and SLURM_NNODES without a step; a shell that an allocation was
// made in may hold variables of a step elsewhere.
TEST_F(SlurmSteps, AreNoneWithoutAStepOrOnAnotherHost) {
  set({{"SLURMD_NODENAME", "b7"}});
  EXPECT_FALSE(slurm_step());
  set(kStep);
  for (const char* name : {"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"}) {
    ::unsetenv(name);
    EXPECT_FALSE(slurm_step()) << name;
    set(kStep);
  }
}

TEST_F(SlurmSteps, WhoseVariablesContradictEachOtherAreRefused) {
  set({{"SLURM_STEP_NUM_NODES", "3"}});
  EXPECT_THROW(slurm_step(), UserError);
  set({{"SLURM_STEP_NUM_NODES", "2"}, {"SLURM_NODEID", "2"}});
  EXPECT_THROW(slurm_step(), UserError);
}

TEST_F(SlurmSteps, MeetAtPortsOfTheirOwn) {
  const SlurmStep a = *slurm_step();
  SlurmStep b = a;
  EXPECT_EQ(slurm_port(a), slurm_port(b));
  b.id = "12.4";
  EXPECT_NE(slurm_port(a), slurm_port(b));
  for (int i = 0; i < 100; ++i) {
    b.id = std::to_string(i);
    EXPECT_GE(slurm_port(b), 20000);
    EXPECT_LT(slurm_port(b), 30000);
  }
}

}  // namespace
}  // namespace tessera::launcher
