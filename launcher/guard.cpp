#include "launcher/guard.h"

#include <fcntl.h>
#include <linux/close_range.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cctype>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>

#include "core/base/error.h"

namespace tessera::launcher {
namespace {

constexpr pid_t kDismissed = 0;

void kill_by_environment(const std::string& entry) {
  std::error_code error;
  for (const auto& process : std::filesystem::directory_iterator("/proc", error)) {
    std::string name = process.path().filename().string();
    if (!std::isdigit(static_cast<unsigned char>(name[0]))) continue;
    pid_t pid = std::stoi(name);
    if (pid == ::getpid()) continue;
    std::ifstream file(process.path() / "environ", std::ios::binary);
    std::string environment(std::istreambuf_iterator<char>(file), {});
    if (environment.find(entry) != std::string::npos) ::kill(pid, SIGKILL);
  }
}

[[noreturn]] void guard(int pipe, const std::string& key) {
  ::setsid();
  ::prctl(PR_SET_NAME, "tlaunch-guard");
  for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE}) ::signal(signal, SIG_IGN);
  // Holding tlaunch's descriptors would keep its readers waiting.
  if (pipe > 0) ::close_range(0, unsigned(pipe) - 1, 0);
  ::close_range(unsigned(pipe) + 1, ~0U, 0);
  std::set<pid_t> groups;
  pid_t message = 0;
  for (;;) {
    ssize_t n = ::read(pipe, &message, sizeof message);
    if (n < 0 && errno == EINTR) continue;
    if (n != ssize_t(sizeof message)) break;
    if (message == kDismissed) ::_exit(0);
    if (message > 0)
      groups.insert(message);
    else
      groups.erase(-message);
  }
  for (pid_t group : groups) ::kill(-group, SIGKILL);
  kill_by_environment("TESSERA_STORE_KEY=" + key);
  ::_exit(0);
}

}  // namespace

Guard::Guard(const std::string& key) {
  int ends[2];
  TESSERA_CHECK(::pipe2(ends, O_CLOEXEC) == 0, "no pipe for the guard: {}", std::strerror(errno));
  pid_ = ::fork();
  TESSERA_CHECK(pid_ >= 0, "cannot fork: {}; is the process limit (ulimit -u) reached?",
                std::strerror(errno));
  if (pid_ == 0) {
    ::close(ends[1]);
    guard(ends[0], key);
  }
  ::close(ends[0]);
  fd_ = ends[1];
}

Guard::~Guard() {
  ::close(fd_);
  // Reaped here, because in a container nobody else may do it.
  int pid_fd = int(::syscall(SYS_pidfd_open, pid_, 0));
  pollfd ended{pid_fd, POLLIN, 0};
  while (::poll(&ended, 1, 2000) < 0 && errno == EINTR) continue;
  ::waitpid(pid_, nullptr, WNOHANG);
  if (pid_fd >= 0) ::close(pid_fd);
}

void Guard::tell(pid_t message) {
  // Smaller than PIPE_BUF, so it is written whole; a guard that was killed is no reason to fail.
  while (::write(fd_, &message, sizeof message) < 0 && errno == EINTR) continue;
}

void Guard::watch(pid_t group) { tell(group); }
void Guard::forget(pid_t group) { tell(-group); }
void Guard::dismiss() { tell(kDismissed); }

}  // namespace tessera::launcher
