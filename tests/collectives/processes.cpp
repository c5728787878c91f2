#include "tests/collectives/processes.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "collectives/store/environment.h"

extern char** environ;

namespace tessera::test {
namespace {

const std::string kKey = "key of the tests";

int start(const std::string& program, const std::map<std::string, std::string>& environment,
          int output) {
  std::vector<std::string> texts;
  for (char** e = environ; *e; ++e) {
    std::string text = *e;
    if (!environment.contains(text.substr(0, text.find('=')))) texts.push_back(text);
  }
  for (const auto& [name, value] : environment) texts.push_back(name + "=" + value);
  texts.push_back("TEST_PROGRAM=" + program);
  std::vector<char*> env;
  for (std::string& t : texts) env.push_back(t.data());
  env.push_back(nullptr);
  std::string self = "/proc/self/exe", filter = "--gtest_filter=Rank.DISABLED_Program",
              also = "--gtest_also_run_disabled_tests";
  char* arguments[] = {self.data(), filter.data(), also.data(), nullptr};
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, output, 1);
  posix_spawn_file_actions_adddup2(&actions, output, 2);
  int pid = 0;
  int error = posix_spawn(&pid, self.c_str(), &actions, nullptr, arguments, env.data());
  posix_spawn_file_actions_destroy(&actions);
  TESSERA_CHECK(error == 0, "cannot start a rank: error {}", error);
  return pid;
}

}  // namespace

RankProcesses::RankProcesses(int n, const std::string& program,
                             std::map<std::string, std::string> environment, int hosts)
    : server_(std::make_unique<TcpStoreServer>("127.0.0.1", 0, kKey)) {
  environment["WORLD_SIZE"] = environment["LOCAL_WORLD_SIZE"] = std::to_string(n);
  environment["MASTER_ADDR"] = "127.0.0.1";
  environment["MASTER_PORT"] = std::to_string(server_->port());
  environment["TESSERA_STORE_KEY"] = kKey;
  environment["TESSERA_RUN_ID"] = "test";
  environment["OMP_NUM_THREADS"] = "1";
  for (int r = 0; r < n; ++r) {
    environment["RANK"] = environment["LOCAL_RANK"] = std::to_string(r);
    if (hosts > 1) environment["TESSERA_HOST_ID"] = fmt::format("host {}", r * hosts / n);
    outputs_.push_back(memfd_create("output", MFD_CLOEXEC));
    pids_.push_back(start(program, environment, outputs_.back()));
  }
}

std::shared_ptr<Store> RankProcesses::store() {
  return std::make_shared<PrefixStore>(attempt_prefix(0), server_->store());
}

RankProcesses::~RankProcesses() {
  for (size_t r = 0; r < pids_.size(); ++r) {
    if (pids_[r] > 0) wait(int(r), 0);
    close(outputs_[r]);
  }
}

RankResult RankProcesses::wait(int r, double seconds) {
  auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  RankResult result;
  int& pid = pids_[size_t(r)];
  while (waitpid(pid, &result.status, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() > deadline) {
      kill(pid, SIGKILL);
      waitpid(pid, &result.status, 0);
      break;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  pid = 0;
  char text[4096];
  off_t at = 0;
  for (ssize_t n; (n = pread(outputs_[size_t(r)], text, sizeof text, at)) > 0; at += n)
    result.output.append(text, size_t(n));
  return result;
}

std::vector<RankResult> RankProcesses::wait_all(double seconds) {
  std::vector<RankResult> results;
  for (size_t r = 0; r < pids_.size(); ++r) results.push_back(wait(int(r), seconds));
  return results;
}

}  // namespace tessera::test
