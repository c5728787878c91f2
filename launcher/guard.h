// The guard is a small process that outlives tlaunch by a moment. It holds one end of a pipe; when
// tlaunch ends, however it ends, the pipe closes and the guard kills every worker's process group,
// and then every other process of the job. Workers themselves die by PR_SET_PDEATHSIG; the guard is
// for the processes they started. It knows these by a mark that a process inherits whatever
// session, parent or environment it has: tlaunch sets its limit of real-time CPU time
// (RLIMIT_RTTIME), which is infinite by default, to a number of 140,000 years or more that no other
// job has. Invariant: after dismiss() it kills nothing.
#pragma once
#include <sys/types.h>

#include <string>

namespace tessera::launcher {

class Guard {
 public:
  /// Marks this process and what it starts from now on, and forks; call it before the process has
  /// threads. `key` is the value of TESSERA_LAUNCHER, which identifies the job where the mark
  /// cannot be set.
  explicit Guard(const std::string& key);
  /// Lets the guard do its work and waits for its end, at most 2 s.
  ~Guard();
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

  void watch(pid_t group);
  void forget(pid_t group);
  /// Says that the job ended well: nothing is to be killed.
  void dismiss();

 private:
  void tell(pid_t message);
  int fd_ = -1;
  pid_t pid_ = -1;
};

}  // namespace tessera::launcher
