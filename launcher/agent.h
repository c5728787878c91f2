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

#include "collectives/store/tcp_server.h"
#include "launcher/agents/membership.h"
#include "launcher/agents/secret.h"
#include "launcher/other_hosts.h"
#include "launcher/supervisor.h"

namespace tessera::launcher {

struct AgentOptions {
  int nnodes = 1, node_rank = 0;
  Address rendezvous;  // where the agent of node 0 listens
  int nproc = 1;
  std::string job = {};  // what must be equal on all hosts, as text for people
  int max_restarts = 0;
  Membership::Time node_timeout{5000}, join_timeout{600000};
};

class Agent final : public OtherHosts {
 public:
  /// Listens, on node 0 at the port of the rendezvous, and begins to look for the others. `server`
  /// is this host's store, which the ranks of all hosts use where this agent leads. Throws
  /// UserError.
  Agent(const AgentOptions& options, const Secret& secret, TcpStoreServer& server);
  /// Sends what is queued, for 1 s at most, and leaves.
  ~Agent() override;

  /// What is next: ranks to start, or the end of the job.
  struct Turn {
    std::optional<Generation> generation;
    int place = 0;          // of this host in the generation
    int attempt = 0;        // 0, 1, ...: equal on all hosts, different in each generation
    bool leads = false;     // this host's store is the one that ranks use
    int exit_code = 0;      // without a generation
    std::string text = {};  // for people, without a generation
  };
  /// Waits for it; returns nullopt where `stop_fd` can be read first. Lines for people go to
  /// `console`.
  std::optional<Turn> await_turn(int stop_fd, Console& console);
  /// Says that the attempt of the last turn has ended on this host.
  void tell_done(const Outcome& outcome);

  // OtherHosts, for the supervisor of that attempt.
  int news_fd() const override;
  News take_news() override;
  void tell_end(int rank, const std::string& how, bool failed) override;
  void tell_failure(const RankFailure& failure) override;
  void tell_signal(int signal) override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
  int attempt_ = -1;  // of the last turn
};

/// The name of this host, without its domain.
std::string host_name();

}  // namespace tessera::launcher
