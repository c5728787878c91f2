// tlaunch: starts a program on several ranks of this machine, and with its like on other hosts, and
// supervises them. It parses options, makes the guard (which must be forked before there are
// threads), then runs the job (job.h). Invariant: tlaunch returns only when no worker is left.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "collectives/store/tcp_server.h"
#include "core/base/error.h"
#include "core/base/open_files.h"
#include "core/base/output.h"
#include "launcher/doctor.h"
#include "launcher/guard.h"
#include "launcher/job.h"
#include "launcher/options.h"
#include "launcher/placement.h"

namespace tessera::launcher {
namespace {

/// Blocks the signals that the supervisor handles and returns a descriptor that reads them.
int take_signals(sigset_t* before) {
  ::signal(SIGPIPE, SIG_IGN);
  sigset_t set;
  sigemptyset(&set);
  for (int s : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGWINCH}) {
    struct sigaction action {};
    ::sigaction(s, nullptr, &action);
    // Ignored under nohup, which must stay so.
    if (action.sa_handler != SIG_IGN) sigaddset(&set, s);
  }
  ::sigprocmask(SIG_BLOCK, &set, before);
  int fd = ::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  TESSERA_CHECK(fd >= 0, "signalfd: {}", std::strerror(errno));
  return fd;
}

/// Raises the limit of open files to what is allowed; returns the limit before, for the workers.
rlimit raise_open_files() {
  rlimit before{};
  ::getrlimit(RLIMIT_NOFILE, &before);
  rlimit raised{before.rlim_max, before.rlim_max};
  ::setrlimit(RLIMIT_NOFILE, &raised);
  return before;
}

/// Checks the limit of open files: what supervision needs, and for each rank two streams, their
/// logs, the process itself and two connections to the store.
void check_open_files(const Options& o) {
  constexpr int kFixed = 13, kOfRank = 7;
  tessera::check_open_files(fmt::format("--nproc {}", o.nproc), kFixed + kOfRank * o.nproc);
}

int run(int argc, char** argv) {
  int exit_code = 0;
  std::optional<Options> options = parse_options(argc, argv, usable_cores(), &exit_code);
  if (!options) return exit_code;
  if (options->doctor) return run_doctor();
  Placement placement = place_ranks(options->nproc, options->bind, options->nodes_of_cards);
  if (options->dry_run) return print_plan(*options, placement);
  const rlimit files_before = raise_open_files();
  check_open_files(*options);
  const bool alone = options->nnodes == 1;
  const Secret secret = alone ? Secret{} : job_secret(options->key_file);
  ::unsetenv("TESSERA_JOB_KEY");  // which ranks have no use for
  const std::string mark = make_store_key().substr(0, 16);
  Guard guard(mark);
  sigset_t mask_before;
  const int signal_fd = take_signals(&mask_before);
  const Run run{*options, placement, guard, mark, signal_fd, files_before, mask_before};
  return alone ? run_alone(run) : run_with_others(run, secret);
}

}  // namespace
}  // namespace tessera::launcher

int main(int argc, char** argv) {
  tessera::reserve_standard_streams();
  bool has_run = false;
  try {
    const int status = tessera::launcher::run(argc, argv);
    has_run = true;
    tessera::check_output();
    return status;
  } catch (const tessera::UserError& e) {
    std::fprintf(stderr, "tlaunch: %s\n", e.what());
    return has_run ? 1 : 2;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "tlaunch: %s\n", e.what());
  }
  return 1;
}
