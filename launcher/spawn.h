// Starts one worker. Invariants: the worker leads a process group of its own, dies with tlaunch
// (PR_SET_PDEATHSIG is bound to the thread that forks, which is the main one), runs with the signal
// state and limits that tlaunch was started with, and inherits none of tlaunch's descriptors.
#pragma once
#include <signal.h>
#include <sys/resource.h>
#include <sys/types.h>

#include <string>
#include <vector>

#include "launcher/placement.h"

namespace tessera::launcher {

struct SpawnRequest {
  int rank = 0;
  const std::string* program = nullptr;
  const std::vector<std::string>* command = nullptr;
  std::vector<std::string> env;  // complete, NAME=VALUE
  std::vector<int> cpus;         // empty: not pinned
  int in = -1, out = -1, err = -1;
  rlimit open_files{};     // as tlaunch was started with
  sigset_t signal_mask{};  // likewise
};

/// What a worker that could not execute the program reports through the status pipe.
struct SpawnFailure {
  int rank;
  int error;  // errno of execve
};

/// Forks a worker; `status_fd` (close-on-exec) receives a SpawnFailure if execve fails. Throws
/// UserError when the limit of processes is reached.
pid_t spawn(const SpawnRequest& request, int status_fd);

/// Returns the environment of this process with `changes` applied.
std::vector<std::string> merged_environment(
    const std::vector<std::pair<std::string, std::string>>& changes);

}  // namespace tessera::launcher
