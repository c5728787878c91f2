// What workers get (environment, input, cores), and what happens to their output.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>

#include "collectives/store/sha256.h"
#include "tests/launcher/command.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;

std::multiset<std::string> lines(const std::string& text) {
  std::multiset<std::string> found;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) found.insert(line);
  return found;
}

class Folder {
 public:
  Folder()
      : path(fs::temp_directory_path() / ("tlaunch-" + detail::to_hex(detail::random_bytes(8)))) {}
  ~Folder() { fs::remove_all(path); }
  std::string read(const std::string& name) const {
    std::ifstream in(path / name);
    return std::string(std::istreambuf_iterator<char>(in), {});
  }
  const fs::path path;
};

TEST(Launch, WorkersSeeTheirEnvironment) {
  Result r =
      tlaunch({"--nproc", "3", "--rdzv-id", "run", "--timeout", "7", "--join-timeout", "90",
               "--env", "A=b c", "--env", "E=", "sh", "-c",
               "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR "
               "$TESSERA_RUN_ID $TESSERA_RESTART_COUNT $TESSERA_TIMEOUT $TESSERA_JOIN_TIMEOUT $A "
               "${E-unset}; "
               "test $MASTER_PORT -gt 0 && test ${#TESSERA_STORE_KEY} = 64"});
  EXPECT_EQ(r.exit_code, 0) << r.err;
  std::multiset<std::string> expected;
  for (std::string k : {"0", "1", "2"})
    expected.insert("[rank" + k + "] " + k + "/3 " + k + "/3 0 127.0.0.1 run 0 7 90 b c");
  // ${E-unset} is empty: the trailing blank goes with it.
  EXPECT_EQ(lines(r.out), expected);
}

// A batch script without srun, on the first of two nodes.
TEST(Launch, NodesOfABatchJobThatStayIdleAreReported) {
  const auto said = [](std::vector<std::string> environment, std::vector<std::string> flags) {
    std::vector<std::string> argv = {"env"};
    argv.insert(argv.end(), environment.begin(), environment.end());
    flags.push_back("true");
    for (const std::string& a : tlaunch_argv(flags)) argv.push_back(a);
    return Command(argv).finish().err;
  };
  const std::string text = "this Slurm job has 2 nodes, of which only this one is used";
  EXPECT_NE(said({"SLURM_JOB_NUM_NODES=2"}, {}).find(text), std::string::npos);
  EXPECT_EQ(said({"SLURM_JOB_NUM_NODES=2"}, {"--standalone"}), "");
  EXPECT_EQ(said({"SLURM_JOB_NUM_NODES=2", "SLURM_STEP_ID=0"}, {}), "");
  EXPECT_EQ(said({"SLURM_JOB_NUM_NODES=1"}, {}), "");
}

TEST(Launch, TasksOfSlurmThatAreNoAgentsAreRefused) {
  const std::vector<std::string> step = {"env",
                                         "SLURM_JOB_ID=1",
                                         "SLURM_STEP_ID=0",
                                         "SLURM_PROCID=0",
                                         "SLURM_STEP_NUM_TASKS=4",
                                         "SLURM_STEP_NUM_NODES=2",
                                         "SLURM_STEP_NODELIST=n[0-1]",
                                         "SLURM_NODEID=0"};
  const auto run = [&](std::vector<std::string> flags) {
    std::vector<std::string> argv = step;
    flags.push_back("true");
    for (const std::string& a : tlaunch_argv(flags)) argv.push_back(a);
    return Command(argv).finish();
  };
  const auto refused = run({});
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_NE(refused.err.find("SLURM_STEP_NUM_TASKS=4 on 2 nodes: start one tlaunch on each node"),
            std::string::npos)
      << refused.err;
  EXPECT_EQ(run({"--standalone"}).exit_code, 0);
}

// They get what tlaunch would have set, and nothing where the user has decided.
TEST(Launch, ProgramsStartedWithoutItWaitAsUnderIt) {
  const char* bin = std::getenv("TESSERA_BIN");
  ASSERT_TRUE(bin);
  const auto environment_of_train = [&](const std::string& variables, const char* names) {
    const std::string script = fmt::format(
        "export {0}; {1}/train --steps=1000000 >/dev/null 2>&1 & "
        "sleep 1; for i in $(seq 300); do tr '\\0' '\\n' </proc/$!/environ | grep -E '{2}' && "
        "break; "
        "sleep 0.1; done; kill -9 $!",
        variables, bin, names);
    Result r = Command({"env", "-u", "GOMP_SPINCOUNT", "-u", "OMP_WAIT_POLICY", "-u",
                        "OMP_NUM_THREADS", "bash", "-c", script})
                   .finish(60);
    return r.out;
  };
  const char* all = "^(GOMP_SPINCOUNT|OMP_WAIT_POLICY|OMP_NUM_THREADS)=";
  EXPECT_EQ(environment_of_train("A=1", all), "GOMP_SPINCOUNT=3000\n");
  EXPECT_EQ(environment_of_train("GOMP_SPINCOUNT=7", all), "GOMP_SPINCOUNT=7\n");
  EXPECT_EQ(environment_of_train("OMP_WAIT_POLICY=active", all), "OMP_WAIT_POLICY=active\n");
  // One of as many ranks as there are cores, of a launcher that binds none; it waits for the
  // others.
  const std::string rank =
      "RANK=0 WORLD_SIZE=4096 LOCAL_WORLD_SIZE=4096 MASTER_PORT=1 TESSERA_STORE_KEY=k";
  const char* threads = "^OMP_NUM_THREADS=";
  EXPECT_EQ(environment_of_train(rank, threads), "OMP_NUM_THREADS=1\n");
  EXPECT_EQ(environment_of_train(rank + " OMP_NUM_THREADS=3", threads), "OMP_NUM_THREADS=3\n");
}

TEST(Launch, OneRankPassesBytesThrough) {
  std::string odd("no newline\r\x1b[K\0end", 18);
  EXPECT_EQ(tlaunch({"cat"}, odd).out, odd);
}

TEST(Launch, OnlyRankZeroReadsInput) {
  Result r = tlaunch({"--nproc", "2", "cat"}, "hello\n");
  EXPECT_EQ(r.out, "[rank0] hello\n");
}

TEST(Launch, NoOutputIsLost) {
  Result r = tlaunch({"--nproc", "2", "--bind", "none", "sh", "-c",
                      "head -c 10000000 /dev/zero | tr '\\0' x | fold -w 99; printf last >&2"});
  EXPECT_EQ(r.exit_code, 0);
  size_t text = size_t(std::count(r.out.begin(), r.out.end(), 'x'));
  EXPECT_EQ(text, 20'000'000u);
  EXPECT_EQ(lines(r.err), (std::multiset<std::string>{"[rank0] last", "[rank1] last"}));
  for (const std::string& line : lines(r.out))
    ASSERT_TRUE(line.starts_with("[rank") && line.size() <= 8 + 99) << line;
}

TEST(Launch, BackgroundWritersMayFinishTheirLine) {
  Result r = tlaunch({"sh", "-c", "(sleep 0.15; echo late) & echo early"});
  EXPECT_EQ(r.out, "early\nlate\n");
}

TEST(Launch, ReaderThatLeavesDoesNotHurt) {
  std::string bin = tlaunch_argv({})[0];
  Result r =
      Command({"sh", "-c",
               bin + " --nproc 2 --bind none sh -c 'yes | head -c 3000000; exit 0' | head -1"})
          .finish();
  EXPECT_NE(r.out.find("] y\n"), std::string::npos);
  EXPECT_EQ(r.err, "");
}

TEST(Launch, OutputThatCannotBeWrittenIsAnError) {
  const std::string bin = tlaunch_argv({})[0];
  auto to_full = [&](const std::string& arguments) {
    return Command({"sh", "-c", bin + " " + arguments + " > /dev/full"}).finish();
  };
  Result r = to_full("--nproc 2 --bind none sh -c 'echo a; sleep 0.1; echo b; exit 0'");
  EXPECT_EQ(r.exit_code, 1);
  EXPECT_EQ(r.err,
            "tlaunch: standard output: cannot write it: No space left on device; what the ranks "
            "print there is lost\n");
  EXPECT_EQ(to_full("--nproc 2 sh -c 'echo a; exit 7'").exit_code, 7);
  for (const char* own : {"--version", "--help", "--dry-run true", "--doctor"}) {
    r = to_full(own);
    EXPECT_EQ(r.exit_code, 1) << own;
    EXPECT_TRUE(r.err.starts_with("tlaunch: standard output: cannot write it")) << own << r.err;
    EXPECT_EQ(lines(r.err).size(), 1u) << own << r.err;
  }
}

TEST(Launch, ClosedOutputIsAnError) {
  const std::string bin = tlaunch_argv({})[0];
  for (const char* arguments : {"--nproc 2 --bind none echo a", "--version"}) {
    Result r = Command({"sh", "-c", bin + " " + arguments + " >&-"}).finish();
    EXPECT_EQ(r.exit_code, 1) << arguments;
    EXPECT_TRUE(r.err.starts_with("tlaunch: standard output: cannot write it")) << r.err;
  }
}

// This happens to a job in the background when its terminal is closed.
TEST(Launch, ATerminalThatHangsUpDoesNotHurt) {
  Folder folder;
  fs::create_directories(folder.path);
  const std::string flag = (folder.path / "flag").string();
  Command job(tlaunch_argv({"sh", "-c",
                            "echo a; until test -e " + flag +
                                "; do sleep 0.01; done; echo b; "
                                "sleep 0.1; echo c; exit 0"}),
              "", true);
  job.wait_for("a");
  job.hang_up();
  std::ofstream{flag};
  Result r = job.finish();
  EXPECT_EQ(r.exit_code, 0);
  EXPECT_EQ(r.err, "");
}

TEST(Launch, LogFilesTeeAndRedirects) {
  Folder folder;
  std::vector<std::string> program = {"sh", "-c", "echo o$RANK; echo e$RANK >&2"};
  auto run = [&](std::vector<std::string> flags) {
    flags.insert(flags.end(),
                 {"--nproc", "2", "--bind", "none", "--log-dir", folder.path.string()});
    flags.insert(flags.end(), program.begin(), program.end());
    return tlaunch(flags);
  };
  Result r = run({"--rdzv-id", "tee"});
  EXPECT_EQ(lines(r.out).size(), 2u);
  EXPECT_EQ(folder.read("tee/attempt_0/rank_1/stdout.log"), "o1\n");
  EXPECT_EQ(folder.read("tee/attempt_0/rank_0/stderr.log"), "e0\n");
  r = run({"--rdzv-id", "redirect", "--redirects", "1:3"});
  EXPECT_EQ(r.out, "[rank0] o0\n");
  EXPECT_EQ(r.err, "[rank0] e0\n");
  EXPECT_EQ(folder.read("redirect/attempt_0/rank_1/stderr.log"), "e1\n");
  EXPECT_FALSE(fs::exists(folder.path / "redirect/attempt_0/rank_0"));
  r = run({"--rdzv-id", "filter", "--local-ranks-filter", "1"});
  EXPECT_EQ(r.out, "[rank1] o1\n");
  EXPECT_EQ(folder.read("filter/attempt_0/rank_0/stdout.log"), "o0\n");
}

TEST(Launch, RankZeroDrawsOnATerminal) {
  Result r =
      Command(tlaunch_argv({"--nproc", "2", "sh", "-c",
                            "test -t 1 && echo tty$RANK; test $RANK = 0 || exit 0; sleep 0.2; "
                            "printf '\\r10%%'; sleep 0.1; printf '\\r20%%'; echo"}),
              "", true)
          .finish();
  EXPECT_NE(r.out.find("[rank0] tty0"), std::string::npos) << r.out;
  EXPECT_EQ(r.out.find("tty1"), std::string::npos) << r.out;
  EXPECT_NE(r.out.find("[rank0] 10%\r[rank0] 20%"), std::string::npos) << r.out;
}

TEST(Launch, BindsRanksToTheirShare) {
  ::unsetenv("OMP_NUM_THREADS");
  std::string mask = "grep Cpus_allowed_list /proc/self/status";
  auto allowed = lines(Command({"sh", "-c", mask}).finish().out);
  Result r =
      tlaunch({"--nproc", "cpu", "--bind", "core", "sh", "-c", mask + "; echo $OMP_NUM_THREADS"});
  EXPECT_EQ(r.exit_code, 0) << r.err;
  size_t cores = size_t(std::count(r.out.begin(), r.out.end(), '\n')) / 2;
  auto found = lines(r.out);
  const bool labelled = cores > 1;  // what one rank prints passes as it is
  std::set<std::string> masks;
  for (const std::string& line : found)
    if (line.find("Cpus") != std::string::npos) masks.insert(line.substr(line.find("Cpus")));
  EXPECT_EQ(masks.size(), cores) << r.out;  // no two ranks share a core
  for (size_t k = 0; k < cores; ++k)
    EXPECT_EQ(found.count((labelled ? "[rank" + std::to_string(k) + "] " : "") + "1"), 1u) << r.out;
  r = tlaunch({"--bind", "none", "sh", "-c", mask});
  EXPECT_EQ(lines(r.out), allowed);
  r = tlaunch({"--nproc", std::to_string(cores + 1), "true"});
  EXPECT_NE(r.err.find("share"), std::string::npos) << r.err;
}

// On a machine of two nodes with four cores each, as hwloc describes it.
TEST(Launch, BindsRanksToTheCoresOfTheirNode) {
  ::setenv("HWLOC_SYNTHETIC", "node:2 core:4 pu:1", 1);
  const Result r = tlaunch({"--nproc", "4", "--bind", "numa", "--dry-run", "true"});
  ::unsetenv("HWLOC_SYNTHETIC");
  EXPECT_EQ(r.exit_code, 0) << r.err;
  for (const char* line : {"rank 0: cpus 0-3: OMP_NUM_THREADS=2 ", "rank 1: cpus 0-3: ",
                           "rank 2: cpus 4-7: OMP_NUM_THREADS=2 ", "rank 3: cpus 4-7: "})
    EXPECT_NE(r.out.find(line), std::string::npos) << line << " is not in\n" << r.out;
}

// tlaunch only waits for the ranks. It takes turns with starts of the program alone, so that both
// are as slow as the machine is.
TEST(Launch, StartsQuickly) {
  constexpr int kTimes = 15;
  std::vector<double> launches, starts;
  for (int i = 0; i < kTimes; ++i) {
    launches.push_back(tlaunch({"--nproc", "2", "true"}).seconds);
    starts.push_back(tlaunch({"--version"}).seconds);
  }
  for (auto* list : {&launches, &starts})
    std::nth_element(list->begin(), list->begin() + kTimes / 2, list->end());
  EXPECT_LT(launches[kTimes / 2], 20 * starts[kTimes / 2]);
}

TEST(Launch, StartsManyRanks) {
  Result r = tlaunch({"--nproc", "200", "sh", "-c", "echo $RANK"});
  EXPECT_EQ(r.exit_code, 0) << r.err;
  EXPECT_EQ(lines(r.out).size(), 200u);
}

}  // namespace
}  // namespace tessera::testing
