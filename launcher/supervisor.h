// Supervises one attempt: starts the workers and stays with them until the last has ended. A single
// loop on one thread handles ends of processes (in the order in which the kernel reports them),
// their output, signals and deadlines. A failure is announced in the store; survivors get 2 s to
// report errors of their own, then SIGTERM, then SIGKILL. Invariant: when run() returns, also by an
// exception, no worker of the attempt runs and all their output has been handed to the console.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collectives/store/store.h"
#include "launcher/console.h"
#include "launcher/guard.h"
#include "launcher/options.h"
#include "launcher/other_hosts.h"
#include "launcher/placement.h"
#include "launcher/spawn.h"
#include "launcher/worker.h"

namespace tessera::launcher {

/// What an attempt needs from the rest of tlaunch.
struct Job {
  const Options& options;
  const Placement& placement;
  Console& console;
  Guard& guard;
  Store* store;  // as the workers of this attempt see it; nullptr: another host serves it
  int signal_fd;
  rlimit open_files;     // for the workers
  sigset_t signal_mask;  // likewise
  /// Returns the environment of a rank.
  std::function<std::vector<std::string>(int rank, int attempt)> environment;
  std::string run_id;               // names a folder of --log-dir
  int first_rank = 0;               // of this host
  std::string on_host;              // " on node1" where there are other hosts, else ""
  OtherHosts* elsewhere = nullptr;  // nullptr: there are none
};

struct Outcome {
  int exit_code = 0;
  int stop_signal = 0;     // the user's signal that ended the attempt, or 0
  std::string report;      // "" when nothing failed
  bool cut_short = false;  // OtherHosts ended it
};

class Supervisor {
 public:
  Supervisor(Job job, int attempt);
  ~Supervisor();

  /// Throws UserError when the workers cannot be started.
  Outcome run();

 private:
  enum class Phase { kRunning, kGrace, kStopping, kKilled };

  void start_all();
  void prepare(Worker& worker);
  void check_started(int status_fd);
  void watch(int fd, uint64_t tag, uint32_t events);
  double now_s() const;

  void loop();
  void on_event(uint64_t tag);
  void on_signal();
  void on_stop_signal(int signal, bool elsewhere = false);
  void on_news();
  void on_exit(Worker& worker);
  void announce(const Worker& worker);
  void note_absent(const std::vector<int>& ranks);
  void put_cause_first();
  void on_output(Worker& worker, int s);
  void on_time();
  double last_end_s() const;
  void look_after_ends();
  void finish_if_done(Worker& worker);
  void signal_all(int signal);
  void write_console();
  Worker* worker_of(int rank) const;
  int wait_ms() const;
  Outcome outcome() const;

  Job job_;
  const int attempt_;
  const double start_s_;
  const double timeout_s_;  // of a collective
  const long memory_kills_;
  int epoll_fd_ = -1;
  int null_fd_ = -1;
  std::vector<std::unique_ptr<Worker>> workers_;
  size_t unfinished_ = 0;
  std::vector<Worker*> failed_;  // in the order of their ends; after loop() the cause is first
  Phase phase_ = Phase::kRunning;
  double phase_end_s_ = 0;
  bool cut_short_ = false;
  bool stopped_elsewhere_ = false;  // another host passed on stop_signal_, and none came here yet
  double left_elsewhere_s_ = -1;    // when the first rank of another host ended well
  std::vector<int> cause_;          // ranks that the others gave up
  int stop_signal_ = 0;
  double stop_s_ = 0;
  bool said_who_runs_ = false;
  double looked_s_ = 0;  // when stopped ranks were last looked for
  bool paused_ = false;  // nothing is read: the console has enough to print
};

}  // namespace tessera::launcher
