#include "collectives/shm/process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string_view>

namespace tessera::detail {
namespace {

// Reads a file; "" where it cannot be opened, with the reason in `errno`.
std::string read_small_file(const char* path) {
  char text[1024];
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return "";
  ssize_t n = read(fd, text, sizeof text);
  close(fd);
  return n > 0 ? std::string(text, size_t(n)) : "";
}

}  // namespace

uint64_t process_start(int pid) {
  // proc(5): "pid (name) state ppid ..."; the name may hold anything, so count from the last ')'.
  std::string stat = read_small_file(fmt::format("/proc/{}/stat", pid).c_str());
  size_t at = stat.rfind(") ");
  if (at == std::string::npos) return 0;
  at += 2;
  if (std::strchr("ZX", stat[at])) return 0;
  for (int field = 3; field < 22; ++field) {
    at = stat.find(' ', at);
    if (at == std::string::npos) return 0;
    ++at;
  }
  return std::strtoull(stat.c_str() + at, nullptr, 10);
}

bool process_ended(int pid, uint64_t started) {
  if (kill(pid, 0) != 0 && errno == ESRCH) return true;
  // A process with this number exists, or its remains do: the one meant, or another.
  errno = 0;
  const uint64_t now = process_start(pid);
  const bool looked = now != 0 || errno == 0 || errno == ENOENT || errno == ESRCH;
  return started != 0 && looked && now != started;
}

std::string host_identity() {
  char host[256] = {}, space[64] = {};
  if (gethostname(host, sizeof host - 1) != 0) host[0] = 0;
  if (readlink("/proc/self/ns/pid", space, sizeof space - 1) < 0) space[0] = 0;
  std::string boot = read_small_file("/proc/sys/kernel/random/boot_id");
  while (!boot.empty() && boot.back() == '\n') boot.pop_back();
  return fmt::format("{} {} {} {}", host, boot, space, getuid());
}

}  // namespace tessera::detail
