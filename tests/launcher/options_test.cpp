// The command line: every bad value gives one clear line and a non-zero exit status, nothing is
// ignored.
#include <gtest/gtest.h>

#include "collectives/store/tcp_server.h"
#include "tests/launcher/command.h"

namespace tessera::testing {
namespace {

using Arguments = std::vector<std::string>;

void expect_refused(const Arguments& arguments, const std::string& part, int code = 2) {
  Result r = tlaunch(arguments);
  EXPECT_EQ(r.exit_code, code) << r.err;
  EXPECT_EQ(r.out, "");
  EXPECT_NE(r.err.find(part), std::string::npos) << r.err;
  EXPECT_EQ(r.err.find('\n'), r.err.size() - 1) << "more than one line: " << r.err;
}

TEST(Options, BadValuesAreOneLine) {
  expect_refused({"--nproc", "0", "true"}, "--nproc 0:");
  expect_refused({"--nproc", "-1", "true"}, "--nproc -1:");
  expect_refused({"--nproc", "4x", "true"}, "--nproc 4x:");
  expect_refused({"--nproc=1000000", "true"}, "--nproc 1000000:");
  expect_refused({"--nproc"}, "--nproc expects a value");
  expect_refused({"--frobnicate", "true"}, "no flag --frobnicate; flags of PROGRAM go after its");
  expect_refused({"--nprco", "2", "true"}, "no flag --nprco (is --nproc meant?)");
  expect_refused({"--nproc=", "true"}, "--nproc: is empty; give it a value");
  expect_refused({"--log-dir=", "--nproc", "2", "true"}, "--log-dir: is empty; give it a value");
  expect_refused({"--log-dir", "--nproc", "2", "true"}, "\"--nproc\" is a flag, not its value");
  expect_refused({"--nproc", "2", "--nproc", "3", "true"}, "--nproc is given twice");
  expect_refused({"--dry-run=maybe", "true"}, "--dry-run = maybe is no value");
  expect_refused({}, "PROGRAM is missing");
  expect_refused({"--bind", "socket", "true"}, "--bind socket:");
  expect_refused({"--timeout", "soon", "true"}, "--timeout soon:");
  expect_refused({"--join-timeout", "0", "true"}, "--join-timeout 0:");
  expect_refused({"--max-restarts", "-1", "true"}, "--max-restarts -1:");
  expect_refused({"--grace", "x", "true"}, "--grace x:");
  expect_refused({"--env", "NAME", "true"}, "--env NAME:");
  expect_refused({"--env", "RANK=3", "true"}, "tlaunch sets RANK itself");
  expect_refused({"--tee", "4", "true"}, "--tee 4:");
  expect_refused({"--redirects", "2:1", "--nproc", "2", "true"}, "--redirects 2:1:");
  expect_refused({"--local-ranks-filter", "0,2", "--nproc", "2", "true"}, "--local-ranks-filter");
  expect_refused({"--rdzv-endpoint", "nowhere", "true"}, "--rdzv-endpoint nowhere:");
  expect_refused({"--rdzv-id", "../x", "true"}, "--rdzv-id ../x:");
}

TEST(Options, SeveralNodesNeedANumberAndAPlaceToMeet) {
  expect_refused({"--nnodes", "x", "true"}, "--nnodes x: expected N or MIN:MAX");
  expect_refused({"--nnodes", "1:4", "true"}, "not available yet; use --nnodes 4");
  expect_refused({"--node-rank", "1", "true"}, "--node-rank 1: give --nnodes too");
  expect_refused({"--nnodes", "2", "true"}, "--nnodes 2: give each host its --node-rank");
  expect_refused({"--nnodes", "2", "--node-rank", "2", "true"},
                 "--node-rank 2: expected a number from 0 to 1");
  expect_refused({"--nnodes", "2", "--node-rank", "0", "true"},
                 "give all hosts the same --rdzv-endpoint HOST:PORT");
  expect_refused({"--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "a:0", "true"},
                 "give all hosts the same --rdzv-endpoint HOST:PORT");
  expect_refused({"--nnodes", "2", "--node-rank", "0", "--standalone", "true"}, "--standalone");
  expect_refused({"--node-timeout", "0.1", "true"},
                 "--node-timeout 0.1: expected seconds from 0.2");
  EXPECT_EQ(tlaunch({"--nnodes", "1:1", "--node-rank", "0", "true"}).exit_code, 0);
}

TEST(Options, AKeyFileThatCannotBeReadIsReported) {
  const auto r = tlaunch({"--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "localhost:1",
                          "--key-file", "/no/such/key", "true"});
  EXPECT_NE(r.exit_code, 0);
  EXPECT_NE(r.err.find("/no/such/key"), std::string::npos) << r.err;
}

TEST(Options, ProgramsThatCannotRun) {
  expect_refused({"no-such-program"}, "no-such-program: no such program", 127);
  expect_refused({"./no-such-program"}, "No such file", 127);
  expect_refused({"/etc/passwd"}, "chmod +x", 126);
  expect_refused({"/tmp"}, "name a file", 126);
}

TEST(Options, ProgramsBesideTlaunchNeedNoPath) {
  Result r = tlaunch({"tlaunch", "--version"});
  EXPECT_EQ(r.exit_code, 0) << r.err;
  EXPECT_EQ(r.out, tlaunch({"--version"}).out);
}

TEST(Options, PortInUseNamesTheProcess) {
  TcpStoreServer server("127.0.0.1", 0, "k");
  std::string port = std::to_string(server.port());
  expect_refused({"--rdzv-endpoint", "127.0.0.1:" + port, "true"},
                 "port " + port + " on 127.0.0.1 is used by pid " + std::to_string(::getpid()));
}

TEST(Options, DashesAndUnderscoresAreEqualBeforeProgramOnly) {
  Result r = tlaunch({"--max_restarts=0", "--rdzv_id", "a_b", "sh", "-c",
                      "echo $TESSERA_RUN_ID \"$@\"", "sh", "--log_dir", "x_y"});
  EXPECT_EQ(r.out, "a_b --log_dir x_y\n") << r.err;
}

TEST(Options, HelpVersionAndDryRunStartNothing) {
  EXPECT_NE(tlaunch({"--help"}).out.find("--max-restarts"), std::string::npos);
  EXPECT_NE(tlaunch({"--help"}).out.find("TESSERA_TIMEOUT"), std::string::npos);
  EXPECT_NE(tlaunch({"--version"}).out.find("tlaunch"), std::string::npos);
  Result r = tlaunch({"--dry-run", "--nproc", "2", "--env", "A=b", "sh", "-c", "exit 3"});
  EXPECT_EQ(r.exit_code, 0);
  EXPECT_NE(r.out.find("rank 1:"), std::string::npos) << r.out;
  EXPECT_NE(r.out.find("A=b"), std::string::npos) << r.out;
}

TEST(Options, WaitingThreadsSleepSoonUnlessTheUserSays) {
  auto plan = [](std::vector<std::string> set) {
    std::vector<std::string> argv{"env", "-u", "OMP_WAIT_POLICY", "-u", "GOMP_SPINCOUNT"};
    argv.insert(argv.end(), set.begin(), set.end());
    for (std::string& word : tlaunch_argv({"--dry-run", "true"})) argv.push_back(std::move(word));
    return Command(argv).finish().out;
  };
  EXPECT_NE(plan({}).find(" GOMP_SPINCOUNT=3000 "), std::string::npos) << plan({});
  for (const char* own : {"OMP_WAIT_POLICY=active", "GOMP_SPINCOUNT=7"})
    EXPECT_EQ(plan({own}).find("GOMP_SPINCOUNT"), std::string::npos) << plan({own});
}

TEST(Options, DoctorReports) {
  Result r = tlaunch({"--doctor"});
  for (const char* part : {"cores", "/dev/shm", "loopback", "host name", "huge pages", "compiler"})
    EXPECT_NE(r.out.find(part), std::string::npos) << r.out;
}

}  // namespace
}  // namespace tessera::testing
