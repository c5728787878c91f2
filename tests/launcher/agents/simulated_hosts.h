// Hosts, agents and a network under a virtual clock, for tests of Membership: every message takes a
// random time, each connection keeps its order, links between hosts can be cut (in one direction
// too), and agents can be ended and started again. The same seed gives the same history.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <random>
#include <string>
#include <vector>

#include "launcher/agents/membership.h"

namespace tessera::launcher::test {

using Time = Membership::Time;

struct SimulatedSettings {
  int hosts = 4, min_nodes = 4, max_nodes = 4;
  bool keeps = false;  // agents that are started again have what they kept
  int max_delay_ms = 5;
  uint64_t seed = 1;
};

class SimulatedHosts {
 public:
  explicit SimulatedHosts(SimulatedSettings settings);
  ~SimulatedHosts();

  /// Starts the agent of a host; `agent_says` is its Node::job.
  void start(int host, const std::string& job = "a job");
  /// Ends it; its connections are reset, unless the host has vanished with it.
  void kill(int host, bool vanishes = false);
  bool alive(int host) const;
  /// Nothing passes from one host to the other, until heal(). What was sent arrives then.
  void cut(int from, int to);
  void heal();

  /// Lets time pass until `end`, or until `done` says so; returns whether it did.
  bool run_until(Time end, const std::function<bool()>& done = nullptr);
  Time now() const { return now_; }

  Membership& agent(int host);
  /// Whether all of these hosts take part in one generation that has no others.
  bool together(const std::vector<int>& hosts);
  /// The generation that all its nodes take part in at this moment; none: nullptr.
  const Generation* training() const;

  /// What went wrong with the invariants; "": nothing.
  const std::string& violation() const { return violation_; }
  /// How often all nodes of a generation took part in it.
  int generations_trained() const { return generations_trained_; }
  /// What the agents of a host have printed, and why the last one gave up.
  std::vector<std::string> notes(int host) const;
  std::string gave_up(int host) const;
  std::vector<std::string> payloads(int host) const;
  long messages() const { return messages_; }

 private:
  struct Agent;
  struct Pipe;
  struct Event {
    Time at;
    uint64_t number;
    std::function<void()> what;
    bool operator>(const Event& other) const {
      return std::tie(at, number) > std::tie(other.at, other.number);
    }
  };

  void after(Time delay, std::function<void()> what);
  Time some_delay();
  void deliver(const std::shared_ptr<Pipe>& pipe);
  void push(const std::shared_ptr<Pipe>& pipe, std::function<void(Agent&, Link)> what);
  void tick(const std::shared_ptr<Agent>& agent);
  void look();

  const SimulatedSettings settings_;
  std::mt19937_64 random_;
  Time now_{0};
  uint64_t number_ = 0;
  int starts_ = 0;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::vector<std::shared_ptr<Agent>> agents_;  // by host; nullptr: none has been started
  std::vector<std::string> disks_;
  std::vector<NodeId> ids_;
  std::vector<std::vector<bool>> cut_;
  std::string violation_;
  int generations_trained_ = 0;
  uint64_t last_number_ = 0;
  Ballot last_ballot_{};
  long messages_ = 0;
};

}  // namespace tessera::launcher::test
