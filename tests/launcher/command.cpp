#include "tests/launcher/command.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cctype>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

namespace tessera::testing {
namespace {

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void make_pipe(int ends[2]) { ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0); }

}  // namespace

Command::Command(const std::vector<std::string>& argv, const std::string& input, bool terminal)
    : start_s_(now_s()) {
  int out[2], err[2], in = ::open("/tmp", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  make_pipe(err);
  if (terminal) {
    winsize size{24, 80, 0, 0};
    ::openpty(&out[0], &out[1], nullptr, nullptr, &size);
    for (int fd : out) ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  } else {
    make_pipe(out);
  }
  EXPECT_EQ(::write(in, input.data(), input.size()), ssize_t(input.size()));
  ::lseek(in, 0, SEEK_SET);
  pid_ = ::fork();
  if (pid_ == 0) {
    ::dup2(in, 0);
    ::dup2(out[1], 1);
    ::dup2(err[1], 2);
    for (int s : {SIGINT, SIGQUIT, SIGHUP}) ::signal(s, SIG_DFL);
    std::vector<char*> pointers;
    for (const std::string& a : argv) pointers.push_back(const_cast<char*>(a.c_str()));
    pointers.push_back(nullptr);
    ::execvp(pointers[0], pointers.data());
    ::_exit(99);
  }
  ::close(in);
  ::close(out[1]);
  ::close(err[1]);
  out_ = out[0];
  err_ = err[0];
}

Command::~Command() {
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  if (out_ >= 0) ::close(out_);
  if (err_ >= 0) ::close(err_);
}

bool Command::read_some(double timeout_s) {
  pollfd p[2] = {{out_, POLLIN, 0}, {err_, POLLIN, 0}};
  if (::poll(p, 2, int(timeout_s * 1000)) <= 0) return true;
  static char buffer[1 << 16];
  for (int i : {0, 1}) {
    if (!p[i].revents) continue;
    int& fd = i == 0 ? out_ : err_;
    ssize_t n = ::read(fd, buffer, sizeof buffer);
    if (n > 0) {
      (i == 0 ? result_.out : result_.err).append(buffer, size_t(n));
    } else {
      ::close(fd);
      fd = -1;
    }
  }
  return out_ >= 0 || err_ >= 0;
}

void Command::wait_for(const std::string& text, double timeout_s) {
  double end = now_s() + timeout_s;
  while (result_.out.find(text) == std::string::npos && now_s() < end)
    if (!read_some(0.1)) break;
  ASSERT_NE(result_.out.find(text), std::string::npos) << result_.out << result_.err;
}

void Command::hang_up() {
  ::close(out_);
  out_ = -1;
}

Result Command::finish(double timeout_s) {
  double end = now_s() + timeout_s;
  while ((out_ >= 0 || err_ >= 0) && now_s() < end) read_some(0.1);
  int status = 0;
  pid_t ended = 0;
  while ((ended = ::waitpid(pid_, &status, WNOHANG)) == 0 && now_s() < end)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (ended == 0) {
    ADD_FAILURE() << "still running after " << timeout_s << " s\n" << result_.out << result_.err;
    return result_;
  }
  pid_ = -1;
  result_.exit_code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  result_.seconds = now_s() - start_s_;
  return result_;
}

std::vector<std::string> tlaunch_argv(std::vector<std::string> arguments) {
  const char* bin = std::getenv("TESSERA_BIN");
  arguments.insert(arguments.begin(), std::string(bin ? bin : "build/bin") + "/tlaunch");
  return arguments;
}

Result tlaunch(std::vector<std::string> arguments, const std::string& input) {
  return Command(tlaunch_argv(std::move(arguments)), input).finish();
}

int count_processes(const std::string& text) {
  int n = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    if (!std::isdigit(static_cast<unsigned char>(entry.path().filename().string()[0]))) continue;
    std::ifstream file(entry.path() / "cmdline", std::ios::binary);
    std::string line(std::istreambuf_iterator<char>(file), {});  // empty for a zombie
    for (char& c : line) c = c ? c : ' ';
    n += line.find(text) != std::string::npos;
  }
  return n;
}

}  // namespace tessera::testing
