#include "tests/support/disk_tracer.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/limits.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <map>

namespace tessera {
namespace {

// Which argument names the file, and how.
enum class By { kFd, kPath, kPathAt };
struct Watched {
  const char* name;
  By by;
  int argument;
};
const std::map<long, Watched>& watched() {
  static const std::map<long, Watched> calls = {
#ifdef SYS_open
      {SYS_open, {"open", By::kPath, 0}},
      {SYS_creat, {"creat", By::kPath, 0}},
      {SYS_rename, {"rename", By::kPath, 1}},
      {SYS_link, {"link", By::kPath, 1}},
      {SYS_symlink, {"symlink", By::kPath, 1}},
      {SYS_unlink, {"unlink", By::kPath, 0}},
      {SYS_mkdir, {"mkdir", By::kPath, 0}},
      {SYS_rmdir, {"rmdir", By::kPath, 0}},
#endif
      {SYS_openat, {"openat", By::kPathAt, 1}},
      {SYS_write, {"write", By::kFd, 0}},
      {SYS_writev, {"writev", By::kFd, 0}},
      {SYS_pwrite64, {"pwrite64", By::kFd, 0}},
      {SYS_pwritev, {"pwritev", By::kFd, 0}},
      {SYS_sendfile, {"sendfile", By::kFd, 0}},
      {SYS_copy_file_range, {"copy_file_range", By::kFd, 2}},
      {SYS_fsync, {"fsync", By::kFd, 0}},
      {SYS_fdatasync, {"fdatasync", By::kFd, 0}},
      {SYS_sync_file_range, {"sync_file_range", By::kFd, 0}},
      {SYS_fallocate, {"fallocate", By::kFd, 0}},
      {SYS_truncate, {"truncate", By::kPath, 0}},
      {SYS_ftruncate, {"ftruncate", By::kFd, 0}},
      {SYS_renameat, {"renameat", By::kPathAt, 3}},
      {SYS_renameat2, {"renameat2", By::kPathAt, 3}},
      {SYS_linkat, {"linkat", By::kPathAt, 3}},
      {SYS_symlinkat, {"symlinkat", By::kPathAt, 2}},
      {SYS_unlinkat, {"unlinkat", By::kPathAt, 1}},
      {SYS_mkdirat, {"mkdirat", By::kPathAt, 1}},
  };
  return calls;
}

std::string fd_path(pid_t tid, int fd) {
  std::error_code error;
  auto path = std::filesystem::read_symlink(
      "/proc/" + std::to_string(tid) + "/fd/" + std::to_string(fd), error);
  return path.string();
}

std::string text_at(pid_t tid, uint64_t address) {
  std::string out;
  for (char c = 1; out.size() < PATH_MAX;) {
    iovec to{&c, 1}, from{reinterpret_cast<void*>(address + out.size()), 1};
    if (process_vm_readv(tid, &to, 1, &from, 1, 0) != 1 || c == 0) break;
    out += c;
  }
  return out;
}

std::optional<DiskCall> look_at(pid_t tid) {
  __ptrace_syscall_info info;
  std::memset(&info, 0, sizeof info);
  if (ptrace(__ptrace_request(PTRACE_GET_SYSCALL_INFO), tid, sizeof info, &info) <= 0) return {};
  if (info.op != PTRACE_SYSCALL_INFO_ENTRY) return {};
  auto at = watched().find(long(info.entry.nr));
  if (at == watched().end()) return {};
  const Watched& w = at->second;
  auto argument = info.entry.args[w.argument];
  DiskCall call{w.name, w.by == By::kFd ? fd_path(tid, int(argument)) : text_at(tid, argument)};
  if (w.by == By::kPathAt && !call.path.starts_with("/") &&
      int(info.entry.args[w.argument - 1]) != AT_FDCWD)
    call.path = fd_path(tid, int(info.entry.args[w.argument - 1])) + "/" + call.path;
  bool opens = call.name == "open" || call.name == "openat";
  if (opens) {
    auto flags = int(info.entry.args[w.argument + 1]);
    if (!(flags & (O_CREAT | O_TRUNC))) return {};
  }
  return call;
}

}  // namespace

TracedRun run_traced(const std::function<int()>& body, std::optional<size_t> kill_at,
                     const std::function<void(const DiskCall&)>& at_entry) {
  TracedRun out;
  std::fflush(nullptr);
  pid_t child = fork();
  if (child == 0) {
    ptrace(PTRACE_TRACEME, 0, nullptr, nullptr);
    raise(SIGSTOP);
    _exit(body());
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFSTOPPED(status));
  long options = PTRACE_O_TRACESYSGOOD | PTRACE_O_TRACECLONE | PTRACE_O_EXITKILL;
  EXPECT_EQ(ptrace(PTRACE_SETOPTIONS, child, nullptr, options), 0) << std::strerror(errno);
  ptrace(PTRACE_SYSCALL, child, nullptr, 0L);
  for (;;) {
    pid_t tid = waitpid(-1, &status, __WALL);
    if (tid < 0) break;
    if (WIFEXITED(status) || WIFSIGNALED(status)) {
      if (tid != child) continue;
      if (WIFEXITED(status)) out.exit_status = WEXITSTATUS(status);
      break;
    }
    int signal = WSTOPSIG(status);
    if (signal == (SIGTRAP | 0x80)) {
      signal = 0;
      if (auto call = look_at(tid); call && !out.killed) {
        if (kill_at && out.calls.size() == *kill_at) {
          call->reached = false;
          out.killed = true;
          kill(child, SIGKILL);
        } else if (at_entry) {
          at_entry(*call);
        }
        out.calls.push_back(std::move(*call));
      }
    } else if (signal == SIGTRAP || signal == SIGSTOP) {
      signal = 0;  // a new thread, on either side
    }
    ptrace(PTRACE_SYSCALL, tid, nullptr, long(signal));
  }
  return out;
}

}  // namespace tessera
