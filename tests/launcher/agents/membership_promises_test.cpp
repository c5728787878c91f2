// What one node promises, message by message. In simulated histories (membership_test.cpp) a node
// has dropped the connections over which most of these messages would come.
#include <gtest/gtest.h>

#include "launcher/agents/membership.h"

namespace tessera::launcher {
namespace {

using Time = Membership::Time;
using Kind = MessageKind;

constexpr NodeId kSelf = 50;

struct Recorder : Membership::Outside {
  Link connect(const std::vector<Address>&) override { return ++links; }
  void send(Link link, std::string message) override {
    const Message m = decode(message);
    if (m.kind != Kind::kBeat) sent.emplace_back(link, m);
  }
  void close(Link) override {}
  void begin(const Generation& g) override { begun.push_back(g.number); }
  void end(const std::string&) override { ++ended; }
  void on_payload(NodeId, std::string_view) override {}
  void give_up(const std::string&) override {}
  void keep(const std::string& state) override { kept = state; }
  void note(const std::string&) override {}

  Link links = 100;
  std::vector<std::pair<Link, Message>> sent;
  std::vector<uint64_t> begun;
  int ended = 0;
  std::string kept;
};

Node node(NodeId id) { return {.id = id, .host = "host", .addresses = {{"host", int(id)}}}; }

Generation generation(Ballot ballot, uint64_t number, std::vector<NodeId> ids) {
  Generation g{.ballot = ballot, .number = number};
  for (NodeId id : ids) g.nodes.push_back(node(id));
  return g;
}

class Promises : public ::testing::Test {
 protected:
  // A node that is not the first: it asks there, over link 101.
  void make(bool first = false, const std::string& kept = "") {
    Membership::Settings s;
    s.min_nodes = 2, s.max_nodes = 5, s.first = first;
    s.rendezvous = {{"host", 1}};
    s.quiet = s.regroup = Time{0};
    machine = std::make_unique<Membership>(s, node(kSelf), kept, out, Time{0});
  }
  void open(Link link) { machine->opened(link, Time{0}); }
  void give(Link link, const Message& m) { machine->received(link, encode(m), Time{0}); }
  void prepare(Link link, const Generation& g, std::vector<Ballot> covers) {
    give(link, {.kind = Kind::kPrepare, .proposal = g, .covers = std::move(covers)});
  }
  // The kind of the last message, which went over `link`.
  Kind said_to(Link link) const {
    EXPECT_FALSE(out.sent.empty());
    EXPECT_EQ(out.sent.back().first, link);
    return out.sent.back().second.kind;
  }

  Recorder out;
  std::unique_ptr<Membership> machine;
};

TEST_F(Promises, NothingOlderIsAccepted) {
  make();
  open(1), open(2);
  prepare(1, generation({5, 7}, 1, {7, kSelf}), {{}});
  EXPECT_EQ(said_to(1), Kind::kAccept);
  prepare(2, generation({5, 6}, 1, {6, kSelf}), {{}, {5, 7}});
  EXPECT_EQ(said_to(2), Kind::kReject);
  EXPECT_EQ(out.sent.back().second.promised, (Ballot{5, 7}));
  prepare(2, generation({5, 8}, 1, {8, kSelf}), {{}, {5, 7}});
  EXPECT_EQ(said_to(2), Kind::kAccept);
}

TEST_F(Promises, WhatWasAcceptedMustBeCovered) {
  make();
  open(1), open(2), open(3);
  prepare(1, generation({1, 7}, 1, {7, kSelf}), {{}});
  prepare(2, generation({2, 8}, 1, {8, kSelf}), {{}});
  EXPECT_EQ(said_to(2), Kind::kReject);
  ASSERT_EQ(out.sent.back().second.known.size(), 2u);  // nothing committed, one accepted
  prepare(2, generation({3, 8}, 1, {8, kSelf}), {{}, {1, 7}});
  EXPECT_EQ(said_to(2), Kind::kAccept);
  prepare(3, generation({4, 9}, 1, {9, kSelf}), {{}, {3, 8}});  // the first one may be in force
  EXPECT_EQ(said_to(3), Kind::kReject);
  prepare(3, generation({5, 9}, 1, {9, kSelf}), {{}, {1, 7}, {3, 8}});
  EXPECT_EQ(said_to(3), Kind::kAccept);
}

TEST_F(Promises, AreKeptOverAStart) {
  make();
  open(1);
  prepare(1, generation({4, 7}, 1, {7, kSelf}), {{}});
  const std::string kept = out.kept;
  out = {};
  make(false, kept);
  open(2);
  prepare(2, generation({3, 8}, 1, {8, kSelf}), {{}, {4, 7}});
  EXPECT_EQ(said_to(2), Kind::kReject);
  prepare(2, generation({5, 8}, 1, {8, kSelf}), {{}});
  EXPECT_EQ(said_to(2), Kind::kReject);
  prepare(2, generation({6, 8}, 1, {8, kSelf}), {{}, {4, 7}});
  EXPECT_EQ(said_to(2), Kind::kAccept);
}

TEST_F(Promises, OnlyWhatWasPromisedLastBegins) {
  make();
  open(1), open(2);
  prepare(1, generation({1, 7}, 1, {7, kSelf}), {{}});
  prepare(1, generation({2, 7}, 1, {7, kSelf}), {{}, {1, 7}});
  give(1, {.kind = Kind::kCommit, .ballot = {1, 7}});
  EXPECT_TRUE(out.begun.empty());
  give(2, {.kind = Kind::kCommit, .ballot = {2, 7}});  // not its leader's word
  EXPECT_TRUE(out.begun.empty());
  give(1, {.kind = Kind::kCommit, .ballot = {2, 7}});
  EXPECT_EQ(out.begun.size(), 1u);
}

TEST_F(Promises, EndWhatIsInForce) {
  make();
  open(1), open(2);
  prepare(1, generation({1, 7}, 1, {7, kSelf}), {{}});
  give(1, {.kind = Kind::kCommit, .ballot = {1, 7}});
  // One that knows no more does not end it.
  give(2, {.kind = Kind::kLead, .node = node(9), .known = {generation({1, 7}, 1, {7, kSelf})}});
  EXPECT_EQ(said_to(2), Kind::kRedirect);
  EXPECT_EQ(out.ended, 0);
  prepare(2, generation({2, 8}, 2, {8, kSelf}), {{1, 7}});
  EXPECT_EQ(said_to(2), Kind::kAccept);
  EXPECT_EQ(out.ended, 1);
}

TEST_F(Promises, BindTheLeaderToo) {
  make(true);
  open(1), open(2);
  give(1, {.kind = Kind::kJoin, .node = node(40)});
  ASSERT_EQ(said_to(1), Kind::kPrepare);
  const Ballot mine = out.sent.back().second.proposal.ballot;
  EXPECT_EQ(mine, (Ballot{1, kSelf}));
  prepare(2, generation({1, 30}, 1, {30, kSelf}), {{}, mine});
  EXPECT_EQ(said_to(2), Kind::kReject);
  const std::string kept = out.kept;
  out = {};
  make(true, kept);
  open(3);
  prepare(3, generation({1, 30}, 1, {30, kSelf}), {{}, mine});
  EXPECT_EQ(said_to(3), Kind::kReject);
}

TEST_F(Promises, AMemberThatAsksToJoinAgainHasLeft) {
  make(true);
  open(1), open(2);
  give(1, {.kind = Kind::kJoin, .node = node(40)});
  give(1, {.kind = Kind::kAccept, .ballot = {1, kSelf}});
  ASSERT_EQ(out.begun, std::vector<uint64_t>{1});
  give(2, {.kind = Kind::kJoin, .node = node(40)});
  EXPECT_EQ(out.ended, 1);
  EXPECT_EQ(said_to(2), Kind::kPrepare);
}

TEST_F(Promises, MessagesOfOtherVersionsEndTheirConnection) {
  make();
  open(1);
  machine->received(1, "not a message", Time{0});
  prepare(1, generation({1, 7}, 1, {7, kSelf}), {{}});
  EXPECT_TRUE(out.sent.empty());
}

}  // namespace
}  // namespace tessera::launcher
