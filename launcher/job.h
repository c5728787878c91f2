// Runs a job's attempts on this host until one ends well or none is left: alone, or as one of
// several hosts (agent.h). Invariant: when a function here returns, no worker of this host is left.
#pragma once
#include <signal.h>
#include <sys/resource.h>

#include <string>

#include "launcher/agents/secret.h"
#include "launcher/guard.h"
#include "launcher/options.h"
#include "launcher/placement.h"

namespace tessera::launcher {

/// What a job needs from the process it runs in.
struct Run {
  const Options& options;
  const Placement& placement;
  Guard& guard;
  std::string mark;  // in the environment of all that this tlaunch starts (guard.h)
  int signal_fd;
  rlimit open_files;     // as tlaunch was started with
  sigset_t signal_mask;  // likewise
};

/// Both return the exit status of tlaunch, and throw UserError.
int run_alone(const Run& run);
int run_with_others(const Run& run, const Secret& secret);

/// Prints what would be run (--dry-run).
int print_plan(const Options& options, const Placement& placement);

}  // namespace tessera::launcher
