#include "launcher/guard.h"

#include <fcntl.h>
#include <linux/close_range.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
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

#include "collectives/store/sha256.h"
#include "core/base/error.h"

namespace tessera::launcher {
namespace {

constexpr pid_t kDismissed = 0;

// A limit of this value or more is a mark.
constexpr rlim_t kLeastMark = rlim_t{1} << 62;
constexpr rlim_t kMarks = rlim_t{1} << 61, kInnerMarks = rlim_t{1} << 60;

// Sets the mark and returns it; 0 if a real limit is set. Inside another job the hard limit stays
// as it is, so that what belongs to the inner job also belongs to the outer one.
rlim_t set_mark() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_RTTIME, &limit) != 0 || limit.rlim_max < kLeastMark) return 0;
  rlim_t number = 0;
  detail::random_bytes(sizeof number).copy(reinterpret_cast<char*>(&number), sizeof number);
  const bool inner = limit.rlim_max != RLIM_INFINITY;
  limit.rlim_cur =
      inner ? kLeastMark + number % kInnerMarks : kLeastMark + kInnerMarks + number % kMarks;
  if (!inner) limit.rlim_max = limit.rlim_cur;
  return ::setrlimit(RLIMIT_RTTIME, &limit) == 0 ? limit.rlim_cur : 0;
}

bool has_mark(pid_t pid, rlim_t mark) {
  rlimit limit{};
  return mark != 0 && ::prlimit(pid, RLIMIT_RTTIME, nullptr, &limit) == 0 &&
         (limit.rlim_cur == mark || limit.rlim_max == mark);
}

bool has_in_environment(pid_t pid, const std::string& entry) {
  std::ifstream file(fmt::format("/proc/{}/environ", pid), std::ios::binary);
  std::string environment(std::istreambuf_iterator<char>(file), {});
  return environment.find(entry) != std::string::npos;
}

// Kills the processes of the job, again and again until a pass finds no new ones: they may have
// been starting others.
void kill_job(rlim_t mark, const std::string& key, pid_t launcher) {
  std::set<pid_t> killed{::getpid(), launcher};
  for (size_t before = 0; before != killed.size();) {
    before = killed.size();
    std::error_code error;
    for (const auto& process : std::filesystem::directory_iterator("/proc", error)) {
      std::string name = process.path().filename().string();
      if (!std::isdigit(static_cast<unsigned char>(name[0]))) continue;
      const pid_t pid = std::stoi(name);
      if (killed.contains(pid)) continue;
      if (!has_mark(pid, mark) && !has_in_environment(pid, "TESSERA_LAUNCHER=" + key)) continue;
      ::kill(pid, SIGKILL);
      killed.insert(pid);
    }
  }
}

[[noreturn]] void guard(int pipe, rlim_t mark, const std::string& key, pid_t launcher) {
  ::setsid();
  ::prctl(PR_SET_NAME, "tlaunch-guard");
  for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE}) ::signal(signal, SIG_IGN);
  // If the guard held tlaunch's descriptors, readers of its output would wait for the guard.
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
  kill_job(mark, key, launcher);
  ::_exit(0);
}

}  // namespace

Guard::Guard(const std::string& key) {
  int ends[2];
  TESSERA_CHECK(::pipe2(ends, O_CLOEXEC) == 0, "no pipe for the guard: {}", std::strerror(errno));
  const rlim_t mark = set_mark();
  const pid_t launcher = ::getpid();
  pid_ = ::fork();
  TESSERA_CHECK(pid_ >= 0, "cannot fork: {}; is the process limit (ulimit -u) reached?",
                std::strerror(errno));
  if (pid_ == 0) {
    ::close(ends[1]);
    guard(ends[0], mark, key, launcher);
  }
  ::close(ends[0]);
  fd_ = ends[1];
}

Guard::~Guard() {
  ::close(fd_);
  // The guard is reaped here, because in a container there may be no other process that does it.
  int pid_fd = int(::syscall(SYS_pidfd_open, pid_, 0));
  pollfd ended{pid_fd, POLLIN, 0};
  while (::poll(&ended, 1, 2000) < 0 && errno == EINTR) continue;
  ::waitpid(pid_, nullptr, WNOHANG);
  if (pid_fd >= 0) ::close(pid_fd);
}

void Guard::tell(pid_t message) {
  // The message is smaller than PIPE_BUF, so it is written whole. If the guard was killed, that is
  // no error.
  while (::write(fd_, &message, sizeof message) < 0 && errno == EINTR) continue;
}

void Guard::watch(pid_t group) { tell(group); }
void Guard::forget(pid_t group) { tell(-group); }
void Guard::dismiss() { tell(kDismissed); }

}  // namespace tessera::launcher
