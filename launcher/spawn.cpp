#include "launcher/spawn.h"

#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <map>

#include "core/base/error.h"

namespace tessera::launcher {
namespace {

constexpr int kBitsPerWord = sizeof(unsigned long) * CHAR_BIT;

std::vector<unsigned long> affinity_mask(const std::vector<int>& cpus) {
  std::vector<unsigned long> words;
  for (int cpu : cpus) {
    size_t word = size_t(cpu / kBitsPerWord);
    if (word >= words.size()) words.resize(word + 1);
    words[word] |= 1UL << (cpu % kBitsPerWord);
  }
  return words;
}

std::vector<char*> pointers(const std::vector<std::string>& strings) {
  std::vector<char*> list;
  for (const std::string& s : strings) list.push_back(const_cast<char*>(s.c_str()));
  list.push_back(nullptr);
  return list;
}

struct Prepared {
  const char* path;
  char* const* argv;
  char* const* envp;
  const std::vector<unsigned long>* mask;
  const SpawnRequest* request;
  pid_t parent;
  int status_fd;
};

// Runs in the child. The parent may have threads, so only async-signal-safe calls are allowed here.
[[noreturn]] void become(const Prepared& p) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != p.parent) ::_exit(127);  // tlaunch died before the line above
  if (!p.mask->empty())
    ::sched_setaffinity(0, p.mask->size() * sizeof(unsigned long),
                        reinterpret_cast<const cpu_set_t*>(p.mask->data()));
  ::setrlimit(RLIMIT_NOFILE, &p.request->open_files);
  ::dup2(p.request->in, 0);
  ::dup2(p.request->out, 1);
  ::dup2(p.request->err, 2);
  // Restores the signals that tlaunch ignores; others stay as they were (nohup).
  for (int s : {SIGPIPE, SIGXFSZ}) ::signal(s, SIG_DFL);
  ::sigprocmask(SIG_SETMASK, &p.request->signal_mask, nullptr);
  ::execve(p.path, p.argv, p.envp);
  SpawnFailure failure{p.request->rank, errno};
  while (::write(p.status_fd, &failure, sizeof failure) < 0 && errno == EINTR) continue;
  ::_exit(failure.error == ENOENT ? 127 : 126);
}

}  // namespace

pid_t spawn(const SpawnRequest& request, int status_fd) {
  std::vector<unsigned long> mask = affinity_mask(request.cpus);
  std::vector<char*> argv = pointers(*request.command), envp = pointers(request.env);
  Prepared prepared{
      request.program->c_str(), argv.data(), envp.data(), &mask, &request, ::getpid(), status_fd};
  pid_t pid = ::fork();
  if (pid == 0) become(prepared);
  TESSERA_CHECK(pid > 0,
                "rank {}: cannot fork ({}); raise the process limit (ulimit -u) or lower --nproc",
                request.rank, std::strerror(errno));
  ::setpgid(pid, pid);  // the child does it too: signals to the group must never miss
  return pid;
}

std::vector<std::string> merged_environment(
    const std::vector<std::pair<std::string, std::string>>& changes) {
  std::map<std::string, std::string> merged;
  for (char** entry = environ; *entry; ++entry) {
    const char* equal = std::strchr(*entry, '=');
    if (equal) merged[std::string(*entry, size_t(equal - *entry))] = equal + 1;
  }
  for (const auto& [name, value] : changes) merged[name] = value;
  std::vector<std::string> list;
  for (const auto& [name, value] : merged) list.push_back(name + "=" + value);
  return list;
}

}  // namespace tessera::launcher
