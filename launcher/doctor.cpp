#include "launcher/doctor.h"

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "collectives/store/sha256.h"
#include "collectives/store/tcp_server.h"
#include "collectives/store/tcp_store.h"
#include "core/base/env.h"
#include "core/base/error.h"
#include "core/base/finding.h"
#include "launcher/placement.h"
#include "launcher/program.h"

namespace tessera::launcher {
namespace {

using Level = Finding::Level;

std::string first_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

Finding check_cores() {
  int cores = usable_cores(), cpus = int(std::thread::hardware_concurrency());
  std::string quota = first_line("/sys/fs/cgroup/cpu.max");
  std::string text = fmt::format("{} physical cores, {} logical CPUs", cores, cpus);
  std::istringstream fields(quota);
  double used = 0, period = 0;
  if (fields >> used >> period && used / period < cores)
    return {Level::kAdvice, fmt::format("{}, but a CPU quota of {:.1f}", text, used / period),
            "start no more ranks than the quota, or raise it"};
  return {Level::kGood, text, ""};
}

Finding check_shared_memory() {
  struct statvfs info {};
  if (::statvfs("/dev/shm", &info) != 0)
    return {Level::kFix, fmt::format("/dev/shm: {}", std::strerror(errno)),
            "mount it: mount -t tmpfs tmpfs /dev/shm"};
  double mib = double(info.f_bavail) * double(info.f_frsize) / (1 << 20);
  std::string name = "/tessera-doctor-" + detail::to_hex(detail::random_bytes(8));
  int fd = ::shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
  int error = errno;
  if (fd >= 0) {
    ::close(fd);
    ::shm_unlink(name.c_str());
  }
  if (fd < 0)
    return {Level::kFix, fmt::format("/dev/shm: cannot be written ({})", std::strerror(error)),
            "chmod 1777 /dev/shm; until then ranks use sockets"};
  std::string text = fmt::format("/dev/shm: writable, {:.0f} MiB free", mib);
  if (mib < 256)
    return {Level::kAdvice, text, "at least 256 MiB is better (docker run --shm-size 1g)"};
  return {Level::kGood, text, ""};
}

Finding check_loopback() {
  try {
    std::string key = make_store_key();
    TcpStoreServer server("127.0.0.1", 0, key);
    TcpStore store("127.0.0.1", server.port(), key, std::chrono::seconds(5));
    auto start = std::chrono::steady_clock::now();
    constexpr int kTrips = 100;
    for (int i = 0; i < kTrips; ++i) store.add("n", 1);
    auto spent =
        std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start);
    return {Level::kGood,
            fmt::format("loopback: store answers in {:.0f} us", spent.count() / kTrips), ""};
  } catch (const Error& e) {
    return {Level::kFix, fmt::format("loopback: {}", e.what()),
            "bring the loopback interface up (ip link set lo up) and allow it in the firewall"};
  }
}

Finding check_hostname() {
  char name[256] = {};
  ::gethostname(name, sizeof name - 1);
  addrinfo* found = nullptr;
  int error = ::getaddrinfo(name, nullptr, nullptr, &found);
  if (found) ::freeaddrinfo(found);
  if (error == 0) return {Level::kGood, fmt::format("host name {} resolves", name), ""};
  return {Level::kAdvice,
          fmt::format("host name {} does not resolve ({})", name, ::gai_strerror(error)),
          "harmless on one node; for several add it to /etc/hosts or to the DNS"};
}

Finding check_huge_pages() {
  std::string mode = first_line("/sys/kernel/mm/transparent_hugepage/enabled");
  if (mode.empty())
    return {Level::kAdvice, "huge pages: the kernel does not tell", "large tensors may be slower"};
  if (mode.find("[never]") != std::string::npos)
    return {Level::kAdvice, "huge pages: off",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"};
  return {Level::kGood, fmt::format("huge pages: {}", mode), ""};
}

Finding check_compiler() {
  for (const char* name : {"c++", "g++", "clang++"}) try {
      return {Level::kGood, fmt::format("compiler: {}", find_program(name)), ""};
    } catch (const ProgramError&) {
      continue;
    }
  return {Level::kAdvice, "compiler: none on PATH", "train --compile needs one: apt install g++"};
}

Finding check_limits() {
  rlimit files{};
  ::getrlimit(RLIMIT_NOFILE, &files);
  std::string text = fmt::format("open files: up to {}", files.rlim_max);
  if (files.rlim_max < 4096)
    return {Level::kAdvice, text, "many ranks need more: ulimit -Hn 65536"};
  return {Level::kGood, text, ""};
}

Finding check_memory() {
  std::ifstream file("/proc/meminfo");
  std::string name, unit;
  double kib = 0, available = 0;
  while (file >> name >> kib >> unit)
    if (name == "MemAvailable:") available = kib;
  std::string text = fmt::format("memory: {:.1f} GiB available", available / (1 << 20));
  if (available < (1 << 20))
    return {Level::kAdvice, text, "end other programs, or train smaller batches"};
  return {Level::kGood, text, ""};
}

Finding check_temporary() {
  const char* folder = std::getenv("TMPDIR");
  std::string path = folder && *folder ? folder : "/tmp";
  if (::access(path.c_str(), W_OK) == 0)
    return {Level::kGood, fmt::format("temporary files: {} is writable", path), ""};
  return {Level::kFix, fmt::format("temporary files: {} ({})", path, std::strerror(errno)),
          "set TMPDIR to a folder you can write"};
}

// What the command prints, to its end. Throws UserError where it cannot be run, fails, or takes
// longer than a driver should need.
std::string output_of(const std::string& program, const char* argument) {
  constexpr int kDeadlineMs = 30'000;
  int ends[2];
  TESSERA_CHECK(::pipe2(ends, O_CLOEXEC) == 0, "no pipe: {}", std::strerror(errno));
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, ends[1], 1);
  ::posix_spawn_file_actions_adddup2(&actions, ends[1], 2);
  std::string name = program, flag = argument;
  char* argv[] = {name.data(), flag.data(), nullptr};
  pid_t child = 0;
  const int error = ::posix_spawn(&child, program.c_str(), &actions, nullptr, argv, environ);
  ::posix_spawn_file_actions_destroy(&actions);
  ::close(ends[1]);
  std::string text;
  pollfd waiting{ends[0], POLLIN, 0};
  bool late = false;
  for (char part[4096]; error == 0;) {
    late = ::poll(&waiting, 1, kDeadlineMs) == 0;
    const ssize_t n = late ? 0 : ::read(ends[0], part, sizeof part);
    if (n <= 0) break;
    text.append(part, size_t(n));
  }
  ::close(ends[0]);
  TESSERA_CHECK(error == 0, "{}: {}", program, std::strerror(error));
  if (late) ::kill(child, SIGKILL);
  int status = 0;
  ::waitpid(child, &status, 0);
  TESSERA_CHECK(!late, "{} says nothing for {} s", program, kDeadlineMs / 1000);
  const std::string last = text.substr(text.find_last_of('\n', text.size() - 2) + 1);
  TESSERA_CHECK(status == 0, "{} {} failed: {}", program, argument,
                WIFSIGNALED(status) ? ::strsignal(WTERMSIG(status)) : last);
  return text;
}

// A driver may take the process that asks it down, so `train` beside tlaunch asks; what it prints
// has the form of findings.
std::string devices_text() {
  try {
    return output_of(own_folder() + "/train", "--devices");
  } catch (const UserError& e) {
    const Finding unknown{Level::kAdvice, fmt::format("devices: {}", e.what()),
                          "train --devices, where it is installed, lists them"};
    return findings_text({&unknown, 1});
  }
}

}  // namespace

int run_doctor() {
  const std::vector<Finding> findings = {check_cores(),    check_memory(),   check_shared_memory(),
                                         check_loopback(), check_hostname(), check_huge_pages(),
                                         check_compiler(), check_limits(),   check_temporary()};
  const std::string text = findings_text(findings) + devices_text();
  fmt::print("{}", text);
  int to_fix = 0, advice = 0;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);)
    to_fix += line.starts_with("FIX "), advice += line.starts_with("hint");
  fmt::print("{} to fix, {} hints\n", to_fix, advice);
  return to_fix > 0 ? 1 : 0;
}

}  // namespace tessera::launcher
