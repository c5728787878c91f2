// What agents agree on: a generation is an ordered list of hosts whose agents train together until
// one of them is lost or another joins. Here are its parts, and the messages by which agents agree
// (membership.h says how). Invariant: decode() accepts what encode() made and throws BadFrame on
// anything else, whatever the bytes.
#pragma once
#include <compare>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "launcher/agents/address.h"

namespace tessera::launcher {

/// Names an agent together with what it has promised. It is drawn at random where an agent starts
/// without what it has kept from before (Membership::Outside::keep); 0 is nobody.
using NodeId = uint64_t;

/// What an agent says of itself.
struct Node {
  NodeId id = 0;
  int slot = -1;                        // --node-rank; -1: any
  int nproc = 1;                        // ranks on this host
  std::string host = {};                // its name
  std::vector<Address> addresses = {};  // where its agent listens
  int store_port = 0;                   // where its store listens
  std::string job = {};  // what must be equal on all hosts, for people; in kJoin alone
  bool operator==(const Node&) const = default;
};

/// For people: "node 1 (node1)", or its host where it has no number.
std::string name_of(const Node& node);

/// Orders all proposals of all agents.
struct Ballot {
  uint64_t round = 0;
  NodeId by = 0;  // who proposes it, and leads it
  auto operator<=>(const Ballot&) const = default;
};

struct Generation {
  Ballot ballot = {};
  std::string run = {};          // the name of the job, the same in all its generations
  int restarts = 0;              // how many generations of the job came before
  uint64_t number = 0;           // 1, 2, ...; later ones that train have higher numbers
  std::vector<Node> nodes = {};  // in the order of their ranks
  bool operator==(const Generation&) const = default;

  /// The place of a node in `nodes`, or -1.
  int place_of(NodeId id) const;
  bool has(NodeId id) const { return place_of(id) >= 0; }
  const Node& leader() const;
  int world_size() const;
  /// The number of the first rank of nodes[place].
  int first_rank(int place) const;
};

enum class MessageKind : uint8_t {
  kBeat,      // ballot, node, sure: `by` lives, and follows `node`; it leads where that is itself
  kJoin,      // node, known: take me into your next generation
  kLead,      // node, known: I gather the next generation, join me
  kRedirect,  // node: ask that one instead
  kRefuse,    // text: you cannot join, and why
  kPrepare,   // proposal, covers, known: promise to take part in nothing older, and accept this one
  kAccept,    // ballot: I do
  kReject,    // ballot, promised, known: I do not; this is what I know
  kCommit,    // ballot: all have accepted it; begin
  kHalt,      // ballot, text: that generation has ended, and why; wait for the next
  kPayload    // ballot, text: for whoever uses the membership, within that generation
};

struct Message {
  MessageKind kind = MessageKind::kBeat;
  Ballot ballot{}, promised{};
  Node node{};
  std::vector<Generation> known = {};  // the newest committed one, then those accepted since
  Generation proposal{};
  std::vector<Ballot> covers =
      {};            // generations of which enough nodes are among those that are asked
  bool sure = true;  // that the node which the sender follows leads
  std::string text = {};
};

std::string encode(const Message& message);
/// Throws wire::BadFrame.
Message decode(std::string_view bytes);

}  // namespace tessera::launcher
