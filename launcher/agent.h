// tlaunch of a job of several hosts: the agents of all hosts agree on a generation (membership.h),
// each starts its ranks, and what happens on one host is told to the others through the leader. A
// host that is lost ends the generation; while restarts are left, the ranks of all hosts are
// started again in the next one. Invariants: everything about agreement happens on one thread of
// the agent's own, so that an agent answers the others whatever its ranks or its console do; every
// agent of a job ends with the same exit status.
#pragma once
#include <memory>
#include <optional>
#include <string>

#include "collectives/store/store.h"
#include "launcher/agents/membership.h"
#include "launcher/agents/secret.h"
#include "launcher/other_hosts.h"

namespace tessera::launcher {

class Console;
struct Outcome;

struct AgentOptions {
  int nnodes = 1, node_rank = 0;
  Address rendezvous;  // where the agent of node 0 listens
  int nproc = 1;
  std::string job = {};  // what must be equal on all hosts, as text for people
  std::string run;       // the name of the job, where this agent leads first
  int max_restarts = 0;
  Membership::Time node_timeout{5000}, join_timeout{600000};
};

class Agent final : public OtherHosts {
 public:
  /// Serves a store, which the ranks of all hosts use where this agent leads; listens, on node 0 at
  /// the port of the rendezvous; and begins to look for the others. Throws UserError.
  Agent(const AgentOptions& options, const Secret& secret);
  /// Sends what is queued, for 1 s at most, and leaves.
  ~Agent() override;

  /// What is next: ranks to start, or the end of the job.
  struct Turn {
    std::optional<Generation> generation;
    int place = 0;                 // of this host in the generation
    std::shared_ptr<Store> store;  // of the attempt, where this agent leads
    std::string key;               // of the store that the ranks use
    int exit_code = 0;             // without a generation
    std::string text = {};         // for people, without a generation
  };
  /// Waits for it. Lines for people go to `console`. A stop signal, which `signal_fd` gives, is
  /// passed on to the ranks of other hosts where some still run; where none do, or at the second
  /// one, the job ends here.
  Turn await_turn(int signal_fd, Console& console);
  /// Says that the attempt of the last turn has ended on this host, unless others ended it.
  /// `final`: it must not be made again.
  void tell_done(const Outcome& outcome, bool final = false);

  // OtherHosts, for the supervisor of that attempt.
  int news_fd() const override;
  News take_news() override;
  void tell_end(int rank, const std::string& how, bool failed) override;
  void tell_failure(const RankFailure& failure) override;
  void tell_signal(int signal) override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
  int attempt_ = -1;      // of the last turn
  bool stopped_ = false;  // a stop signal has come while no rank of this host ran
};

/// The name of this host, without its domain.
std::string host_name();

}  // namespace tessera::launcher
