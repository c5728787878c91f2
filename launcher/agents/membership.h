// Which hosts train together, and who leads: the part of an agent that is a pure state machine. It
// is told what happens (connections, messages, time) and acts through Outside, so tests drive it
// through thousands of random histories under a virtual clock.
//
// How agents agree: one leader gathers nodes and proposes a generation, an ordered list of them,
// under a ballot that is higher than all it has seen. A node that accepts promises to take part in
// nothing older, and ends what it runs. When all nodes of the proposal have accepted, the leader
// commits it, and they begin. (This is Paxos for a value that names its own acceptors: Lamport,
// "Paxos Made Simple", 2001; Lamport, Malkhi and Zhou, "Reconfiguring a State Machine", 2010.)
//
// Invariants, for any loss, delay or cut of connections and any end of agents:
// - Where the number of hosts may change, a proposal is made only if the nodes that are asked
//   contain a quorum of the newest committed generation, and of each that any of them has accepted
//   since: more than half of its nodes, or half with its first one. Agents that are started again
//   remember what they have promised. Hence a committed generation shares a node with the next one,
//   and the node takes part in the newer of them alone.
// - Where it is fixed, and each host has a number of its own, a proposal is made if there is a node
//   for each number. Agents need to remember nothing, but an agent must not be started under a
//   number while another lives under it.
// - In both cases, at no time do all nodes of two generations take part in them; and generations
//   that train have increasing numbers, as long as one node remembers the last.
#pragma once
#include <chrono>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "launcher/agents/generation.h"

namespace tessera::launcher {

class Membership {
 public:
  using Time = std::chrono::milliseconds;  // since any moment; never goes back

  struct Settings {
    int min_nodes = 1, max_nodes = 1;
    /// Whether this agent is the one that the others are told to ask first; it alone may gather the
    /// first generation.
    bool first = false;
    std::vector<Address> rendezvous;  // where that one listens
    std::string run;                  // the name of the job, where this agent gathers its first one
    Time heartbeat{100};
    Time node_timeout{5000};    // without a word from a node, it is lost
    Time join_timeout{600000};  // for nodes to come together
    Time quiet{3000};   // where more nodes may come, the first generation waits so long for them
    Time regroup{300};  // and later ones wait so long
    Time retry{100};    // between attempts to reach the same node
    bool fixed() const { return min_nodes == max_nodes; }
  };

  /// What the machine acts on. No call may call back into the machine.
  class Outside {
   public:
    virtual ~Outside() = default;
    /// Starts a connection; opened() or lost() follows.
    virtual Link connect(const std::vector<Address>& addresses) = 0;
    virtual void send(Link link, std::string message) = 0;
    virtual void close(Link link) = 0;
    /// This node takes part in a generation from now on.
    virtual void begin(const Generation& generation) = 0;
    /// It does so no more; `why` is text for people.
    virtual void end(const std::string& why) = 0;
    /// A payload of another node of the generation in force.
    virtual void on_payload(NodeId from, std::string_view payload) = 0;
    /// Nothing more will be done: this node was refused, or others did not come in time.
    virtual void give_up(const std::string& why) = 0;
    /// What the constructor gets as `kept` where this agent is started again on this host. It must
    /// be on disk before what is sent afterwards leaves: it holds what this node has promised.
    virtual void keep(const std::string& state) = 0;
    /// A line for people.
    virtual void note(const std::string& text) = 0;
  };

  /// `kept`: what keep() was last given by an agent with this id; "": nothing. Throws BadFrame.
  Membership(Settings settings, Node self, const std::string& kept, Outside& outside, Time now);

  /// A connection is there, whoever made it.
  void opened(Link link, Time now);
  void received(Link link, std::string_view message, Time now);
  /// A connection has ended or could not be made; `why` is text for people.
  void lost(Link link, const std::string& why, Time now);
  /// To be called every Settings::heartbeat.
  void tick(Time now);

  /// On the leader: ends the generation in force on all nodes; the next one is gathered at once.
  void renew(const std::string& why, Time now);
  /// On the leader: sends all other nodes away, which then give up for this reason.
  void dismiss(const std::string& why);
  /// To the leader of the generation in force; to all other nodes of it, from the leader.
  void tell_leader(const std::string& payload);
  void tell_all(const std::string& payload);

  bool leads() const { return leading_; }
  /// The generation that this node takes part in.
  const Generation* current() const { return active_ ? &committed_ : nullptr; }
  /// The newest committed one that this node knows of, which need not have this node in it; its
  /// number is 0 where there is none.
  const Generation& committed() const { return committed_; }

 private:
  struct Peer {
    NodeId node = 0;  // 0: unknown yet
    Time heard{0};
    bool opened = false;
    bool probe = false;  // made to tell the other side that this node gathers
  };
  struct Candidate {
    Node node = {};
    Link link = 0;
    int turn = 0;  // the order in which they came
    bool accepted = false;
  };

  void on_join(Link link, const Message& m, Time now);
  void on_lead(Link link, const Message& m, Time now);
  void on_prepare(Link link, const Message& m, Time now);
  void on_accept(Link link, const Message& m, Time now);
  void on_reject(const Message& m, Time now);
  void on_commit(Link link, const Message& m, Time now);
  void on_halt(Link link, const Message& m, Time now);
  void on_payload(Link link, const Message& m);

  void seek(Time now);
  void join(const Node& leader, Time now);
  bool follows_another(NodeId than) const;
  void follow(Link link, const Node& leader);
  void on_beat(Link link, const Message& m, Time now);
  void send_away(const Node& leader);
  void lead(Time now);
  void yield_to(const Node& node, Time now);
  void probe(Time now);
  void wait_on(Time now);
  void lose_leader(const std::string& why, Time now);
  void lose_candidate(NodeId id, const std::string& why, Time now);
  void stop(const std::string& why, Time now);
  void halt_all(const std::string& why, Time now);

  bool learn(const std::vector<Generation>& known, Time now);
  std::vector<Generation> known() const;
  const Generation& newest() const;
  std::string reason_to_refuse(const Node& node, Time now);
  bool is_taken(const Node& node) const;
  void try_form(Time now);
  void try_commit(Time now);
  std::vector<Node> choose() const;
  void take_force(Generation generation, Time now);
  bool has_quorum(const Generation& of, const std::vector<Node>& chosen) const;
  std::string whom_it_waits_for() const;

  void send(Link link, const Message& message);
  void drop(Link link);
  void keep();

  const Settings settings_;
  const Node self_;
  Outside& outside_;
  bool done_ = false;

  // What this node has promised and accepted.
  Ballot promised_;
  Generation committed_;             // the newest that it knows of
  std::vector<Generation> pending_;  // accepted since, by ballot
  bool active_ = false;              // committed_ is in force here

  std::map<Link, Peer> peers_;

  // As one that follows, or looks for a leader.
  Link leader_link_ = 0;
  Node leader_;                // its id is 0 while it is not known who answers there
  bool leader_leads_ = false;  // it has said so
  Time asked_{0};              // when it was asked
  std::set<NodeId> suspects_;
  Time try_again_{0};

  // As one that leads.
  bool leading_ = false;
  std::map<NodeId, Candidate> candidates_;  // others, also those that wait while nobody leads
  int turns_ = 0;
  std::map<NodeId, Time> came_first_;  // nodes whose number another one has
  std::optional<Generation> proposal_;
  Time changed_{0};  // when a candidate last came or went
  Time probed_{0};
  std::map<NodeId, Node> missed_;  // nodes of earlier generations that may come back

  Time apart_since_{0};  // since when no generation is in force here
  Time said_{0};
  std::string last_loss_;
};

}  // namespace tessera::launcher
