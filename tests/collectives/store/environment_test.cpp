// The environment of a job: defaults, and one line of error for whatever is wrong.
#include "collectives/store/environment.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "collectives/store/memory_store.h"
#include "collectives/store/tcp_server.h"

namespace tessera {
namespace {

constexpr const char* kNames[] = {"RANK",
                                  "WORLD_SIZE",
                                  "LOCAL_RANK",
                                  "LOCAL_WORLD_SIZE",
                                  "GROUP_RANK",
                                  "MASTER_ADDR",
                                  "MASTER_PORT",
                                  "TESSERA_STORE_KEY",
                                  "TESSERA_RESTART_COUNT",
                                  "TESSERA_RUN_ID",
                                  "OMPI_COMM_WORLD_RANK",
                                  "OMPI_COMM_WORLD_SIZE",
                                  "OMPI_COMM_WORLD_LOCAL_RANK",
                                  "OMPI_COMM_WORLD_LOCAL_SIZE",
                                  "SLURM_STEP_NUM_TASKS",
                                  "PMI_SIZE"};

class Environment : public testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : kNames) ::unsetenv(name);
  }
  void TearDown() override { SetUp(); }
  void set(const char* name, const std::string& value) { ::setenv(name, value.c_str(), 1); }
  /// Expects an error whose text is one line with all of `parts`.
  void expect_error(std::initializer_list<const char*> parts) {
    try {
      job_environment();
      ADD_FAILURE() << "accepted";
    } catch (const UserError& e) {
      std::string text = e.what();
      EXPECT_EQ(text.find('\n'), std::string::npos);
      for (const char* part : parts) EXPECT_NE(text.find(part), std::string::npos) << text;
    }
  }
};

TEST_F(Environment, IsOneRankByDefault) {
  JobEnvironment job = job_environment();
  EXPECT_EQ(job.rank, 0);
  EXPECT_EQ(job.world_size, 1);
  auto store = connect_store(job);
  EXPECT_NE(dynamic_cast<MemoryStore*>(store.get()), nullptr);
}

TEST_F(Environment, ReadsWhatTheLauncherSets) {
  TcpStoreServer server("127.0.0.1", 0, "secret");
  set("RANK", "5");
  set("WORLD_SIZE", "8");
  set("LOCAL_RANK", "1");
  set("LOCAL_WORLD_SIZE", "4");
  set("GROUP_RANK", "1");
  set("MASTER_PORT", std::to_string(server.port()));
  set("TESSERA_STORE_KEY", "secret");
  set("TESSERA_RESTART_COUNT", "2");
  set("TESSERA_RUN_ID", "run");
  JobEnvironment job = job_environment();
  EXPECT_EQ(job.rank, 5);
  EXPECT_EQ(job.local_rank, 1);
  EXPECT_EQ(job.group_rank, 1);
  EXPECT_EQ(job.run_id, "run");
  connect_store(job)->set("k", "v");
  EXPECT_EQ(server.store()->get(attempt_prefix(2) + "k", Millis(0)), "v");
}

// Four tasks of srun would run four trainings.
TEST_F(Environment, TasksOfOtherLaunchersAreRefused) {
  for (const char* size : {"SLURM_STEP_NUM_TASKS", "PMI_SIZE"}) {
    set(size, "4");
    expect_error({size, "=4, but no WORLD_SIZE", "tlaunch", "set WORLD_SIZE=1"});
    set("WORLD_SIZE", "1");  // what tlaunch --standalone sets in each task
    EXPECT_EQ(job_environment().world_size, 1);
    ::unsetenv("WORLD_SIZE");
    set(size, "1");
    EXPECT_EQ(job_environment().world_size, 1);
    ::unsetenv(size);
  }
}

TEST_F(Environment, NamesTheVariableThatIsWrong) {
  set("WORLD_SIZE", "2");
  for (const char* rank : {"-1", "4x", "1e1", " 1", "99999999999999999999"}) {
    set("RANK", rank);
    expect_error({"RANK", rank});
  }
  set("RANK", "2");
  expect_error({"RANK=2", "WORLD_SIZE=2"});
  set("RANK", std::string(1 << 20, '7'));
  expect_error({"RANK=\"777"});
  set("RANK", "0");
  set("WORLD_SIZE", "0");
  expect_error({"WORLD_SIZE", "\"0\""});
  set("WORLD_SIZE", "2");
  set("LOCAL_WORLD_SIZE", "3");
  expect_error({"LOCAL_WORLD_SIZE=3", "WORLD_SIZE=2"});
  set("LOCAL_WORLD_SIZE", "2");
  set("LOCAL_RANK", "2");
  expect_error({"LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"});
  set("LOCAL_RANK", "0");
  set("MASTER_PORT", "70000");
  expect_error({"MASTER_PORT", "70000"});
}

TEST_F(Environment, ReadsWhatMpirunSetsWhereNobodyElseDoes) {
  set("OMPI_COMM_WORLD_RANK", "3");
  set("OMPI_COMM_WORLD_SIZE", "4");
  set("OMPI_COMM_WORLD_LOCAL_RANK", "1");
  set("OMPI_COMM_WORLD_LOCAL_SIZE", "2");
  JobEnvironment job = job_environment();
  EXPECT_TRUE(job.mpirun);
  EXPECT_EQ(job.rank, 3);
  EXPECT_EQ(job.world_size, 4);
  EXPECT_EQ(job.local_rank, 1);
  EXPECT_EQ(job.local_world_size, 2);
  set("RANK", "3");
  set("WORLD_SIZE", "4");
  EXPECT_FALSE(job_environment().mpirun) << "tlaunch's come first";
  set("WORLD_SIZE", "8");
  expect_error({"WORLD_SIZE=8", "OMPI_COMM_WORLD_SIZE=4", "two launchers"});
  set("WORLD_SIZE", "4");
  set("RANK", "2");
  expect_error({"RANK=2", "OMPI_COMM_WORLD_RANK=3", "two launchers"});
}

TEST_F(Environment, RefusesHalfOfIt) {
  set("RANK", "1");
  expect_error({"RANK=1", "WORLD_SIZE"});
  ::unsetenv("RANK");
  set("WORLD_SIZE", "2");
  expect_error({"WORLD_SIZE=2", "RANK"});
  set("RANK", "1");
  EXPECT_THROW(connect_store(job_environment()), UserError);
}

}  // namespace
}  // namespace tessera
