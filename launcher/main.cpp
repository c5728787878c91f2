// tlaunch: starts a program on several ranks of this machine and supervises them. It parses
// options, makes the guard (which must be forked before there are threads), starts the store, then
// runs attempts. Invariant: tlaunch returns only when no worker is left.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "collectives/store/environment.h"
#include "collectives/store/tcp_server.h"
#include "core/base/error.h"
#include "core/base/open_files.h"
#include "core/base/output.h"
#include "launcher/doctor.h"
#include "launcher/options.h"
#include "launcher/placement.h"
#include "launcher/process_threads.h"
#include "launcher/supervisor.h"

namespace tessera::launcher {
namespace {

using Changes = std::vector<std::pair<std::string, std::string>>;

/// The variables that a rank's environment has besides those of tlaunch.
Changes rank_environment(const Options& o, const Placement& placement, int port,
                         const std::string& key, int rank, int attempt) {
  std::string nproc = std::to_string(o.nproc), me = std::to_string(rank);
  Changes changes;
  int cores = placement.ranks[size_t(rank)].cores;
  if (!std::getenv("OMP_NUM_THREADS"))
    changes.emplace_back("OMP_NUM_THREADS", std::to_string(cores));
  bool user_places = std::getenv("OMP_PROC_BIND") || std::getenv("OMP_PLACES") ||
                     std::getenv("OMP_NUM_THREADS") || std::getenv("GOMP_CPU_AFFINITY");
  if (o.bind != Bind::kNone && cores > 1 && !placement.shared && !user_places) {
    changes.emplace_back("OMP_PROC_BIND", "close");
    changes.emplace_back("OMP_PLACES", "cores");
  }
  if (!std::getenv("OMP_WAIT_POLICY") && !std::getenv("GOMP_SPINCOUNT"))
    changes.emplace_back("GOMP_SPINCOUNT", kSpins);
  if (o.timeout_s > 0) changes.emplace_back("TESSERA_TIMEOUT", std::to_string(o.timeout_s));
  if (o.join_timeout_s > 0)
    changes.emplace_back("TESSERA_JOIN_TIMEOUT", std::to_string(o.join_timeout_s));
  changes.insert(changes.end(), o.env.begin(), o.env.end());
  changes.insert(changes.end(), {{"RANK", me},
                                 {"LOCAL_RANK", me},
                                 {"WORLD_SIZE", nproc},
                                 {"LOCAL_WORLD_SIZE", nproc},
                                 {"GROUP_RANK", "0"},
                                 {"MASTER_ADDR", o.host},
                                 {"MASTER_PORT", std::to_string(port)},
                                 {"TESSERA_RUN_ID", o.run_id},
                                 {"TESSERA_RESTART_COUNT", std::to_string(attempt)},
                                 {"TESSERA_STORE_KEY", key}});
  return changes;
}

int print_plan(const Options& o, const Placement& placement) {
  fmt::print("store: {}:{}\n", o.host, o.port ? std::to_string(o.port) : "any free port");
  fmt::print("run: {}, up to {} restarts\n", o.run_id, o.max_restarts);
  if (!placement.note.empty()) fmt::print("note: {}\n", placement.note);
  if (!o.log_dir.empty()) fmt::print("logs: {}/{}/attempt_0\n", o.log_dir, o.run_id);
  std::string command = o.program;
  for (size_t i = 1; i < o.command.size(); ++i) command += " " + o.command[i];
  for (int rank = 0; rank < o.nproc; ++rank) {
    const Place& place = placement.ranks[size_t(rank)];
    fmt::print("rank {}: {}:", rank,
               place.cpus.empty() ? "not bound" : "cpus " + cpu_list(place.cpus));
    for (const auto& [name, value] : rank_environment(o, placement, o.port, "(secret)", rank, 0))
      fmt::print(" {}={}", name, value);
    fmt::print(" {}\n", command);
  }
  return 0;
}

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

int run_attempts(const Options& o, const Placement& placement, Guard& guard, const std::string& key,
                 const rlimit& files_before) {
  sigset_t mask_before;
  int signal_fd = take_signals(&mask_before);
  Console console(o.nproc > 1);
  if (!placement.note.empty()) console.note("tlaunch: " + placement.note);
  if (o.idle_nodes > 0)
    console.note(
        fmt::format("tlaunch: this Slurm job has {} nodes, of which only this one is used: tlaunch "
                    "cannot use several yet (--standalone silences this line)",
                    o.idle_nodes + 1));
  console.flush(0, -1);
  TcpStoreServer server(o.host, o.port, key);
  for (int attempt = 0;; ++attempt) {
    PrefixStore store(attempt_prefix(attempt), server.store());
    auto environment = [&](int rank, int k) {
      return merged_environment(rank_environment(o, placement, server.port(), key, rank, k));
    };
    Outcome outcome = Supervisor({o, placement, console, guard, store, signal_fd, files_before,
                                  mask_before, environment},
                                 attempt)
                          .run();
    if (!outcome.report.empty()) console.note(outcome.report);
    bool again = outcome.exit_code != 0 && outcome.stop_signal == 0 && attempt < o.max_restarts;
    if (again)
      console.note(fmt::format("tlaunch: restarting all ranks, restart {} of {}", attempt + 1,
                               o.max_restarts));
    console.flush(again ? 0 : outcome.stop_signal ? 1000 : 60000, signal_fd);
    if (!again) {
      if (outcome.exit_code == 0) guard.dismiss();
      return outcome.exit_code == 0 && console.lost() ? 1 : outcome.exit_code;
    }
    server.forget(attempt_prefix(attempt));
  }
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
  std::string key = make_store_key();
  Guard guard(key);
  return run_attempts(*options, placement, guard, key, files_before);
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
