#include "launcher/worker.h"

#include <fcntl.h>
#include <pty.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/base/error.h"
#include "core/base/log.h"

namespace tessera::launcher {
namespace {

constexpr size_t kTailBytes = 8 << 10;
constexpr long kViewLines = 16;  // of a terminal of 24, which also shows the report

void close_if_open(int& fd) {
  if (fd >= 0) ::close(fd);
  fd = -1;
}

bool write_all(int fd, const char* bytes, size_t n) {
  while (n > 0) {
    ssize_t w = ::write(fd, bytes, n);
    if (w < 0 && errno == EINTR) continue;
    if (w < 0) return false;
    bytes += w;
    n -= size_t(w);
  }
  return true;
}

}  // namespace

Worker::~Worker() {
  for (Stream& stream : streams) {
    close_if_open(stream.fd);
    close_if_open(stream.child_fd);
    close_if_open(stream.log_fd);
  }
  close_if_open(pid_fd);
}

void Worker::open_stream(int s, bool terminal) {
  Stream& stream = streams[s];
  int ends[2];
  if (terminal && ::openpty(&ends[0], &ends[1], nullptr, nullptr, nullptr) == 0) {
    termios raw{};
    ::tcgetattr(ends[1], &raw);
    ::cfmakeraw(&raw);  // the real terminal does the translations
    ::tcsetattr(ends[1], TCSANOW, &raw);
    winsize size{};
    if (::ioctl(s + 1, TIOCGWINSZ, &size) == 0) ::ioctl(ends[1], TIOCSWINSZ, &size);
    for (int fd : ends) ::fcntl(fd, F_SETFD, FD_CLOEXEC);
    stream.interactive = true;
  } else {
    TESSERA_CHECK(::pipe2(ends, O_CLOEXEC) == 0,
                  "rank {}: no pipe ({}); raise the limit of open files (ulimit -n)", rank,
                  std::strerror(errno));
  }
  stream.fd = ends[0];
  stream.child_fd = ends[1];
  ::fcntl(stream.fd, F_SETFL, O_NONBLOCK);
}

void Worker::open_log(int s, const std::string& path) {
  streams[s].log_fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  TESSERA_CHECK(streams[s].log_fd >= 0, "--log-dir: cannot write {} ({})", path,
                std::strerror(errno));
}

void Worker::close_child_ends() {
  for (Stream& stream : streams) close_if_open(stream.child_fd);
}

bool Worker::read_stream(int s, Console& console, size_t max_bytes) {
  Stream& stream = streams[s];
  static thread_local std::array<char, 64 << 10> buffer;
  for (size_t total = 0; total < max_bytes;) {
    ssize_t n = ::read(stream.fd, buffer.data(), buffer.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return true;
    if (n <= 0) return false;  // a pseudo-terminal ends with EIO
    total += size_t(n);
    std::string_view bytes(buffer.data(), size_t(n));
    // A full disk must not stop the job.
    if (stream.log_fd >= 0 && !write_all(stream.log_fd, bytes.data(), bytes.size())) {
      logging::warn("tlaunch: the log of rank {} misses output from here on ({})", rank,
                    std::strerror(errno));
      close_if_open(stream.log_fd);
    }
    if (stream.on_console) console.write(rank, s, stream.interactive, bytes);
    stream.shown_at = console.lines();
    tail.append(bytes.substr(bytes.size() - std::min(bytes.size(), kTailBytes)));
    if (tail.size() > 2 * kTailBytes) tail.erase(0, tail.size() - kTailBytes);
  }
  return true;
}

void Worker::close_stream(int s, Console& console) {
  console.end(rank, s);
  close_if_open(streams[s].fd);
  close_if_open(streams[s].log_fd);
}

void Worker::signal_group(int signal) const {
  if (pid > 0 && !finished) ::kill(-pid, signal);
}

bool Worker::poll_exit() {
  siginfo_t info{};
  if (::waitid(P_PID, id_t(pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0)
    return false;
  status = info.si_code == CLD_EXITED ? (info.si_status & 0xff) << 8 : info.si_status;
  return true;
}

void Worker::finish() {
  ::kill(-pid, SIGKILL);
  while (::waitpid(pid, nullptr, 0) < 0 && errno == EINTR) continue;
  finished = true;
  close_if_open(pid_fd);
}

bool Worker::in_view(const Console& console) const {
  for (int s : {0, 1}) {
    const Stream& stream = streams[s];
    if (stream.shown_at < 0) continue;
    const bool seen = stream.on_console && (s == 1 || console.one_place());
    if (!seen || console.lines() - stream.shown_at > kViewLines) return false;
  }
  return true;
}

std::string Worker::how() const {
  if (WIFSIGNALED(status))
    return fmt::format("signal {} ({})", WTERMSIG(status), ::strsignal(WTERMSIG(status)));
  return fmt::format("exit status {}", WEXITSTATUS(status));
}

int Worker::exit_code() const {
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace tessera::launcher
