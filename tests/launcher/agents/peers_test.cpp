// Connections between agents: messages, how links begin and end, peers that are slow or absent.
// Strangers and changed messages: peers_strangers_test.cpp.
#include "launcher/agents/peers.h"

#include <boost/asio/steady_timer.hpp>
#include <fstream>

#include "core/base/error.h"
#include "tests/launcher/agents/agents.h"

namespace tessera::testing {
namespace {

using namespace std::chrono_literals;
using Loss = Peers::Loss;

/// Two agents, of which `server` listens on loopback.
class PeersTest : public ::testing::Test {
 protected:
  // Makes a connection; `at` and `from` are its ends.
  void join() {
    at = client.peers.connect({address()}, 60s);
    ASSERT_TRUE(run_until(io, [&] { return client.opened.size() && server.opened.size(); }));
    from = server.last;
  }
  Address address() const { return {"127.0.0.1", port}; }

  boost::asio::io_context io;
  Agent server{io}, client{io};
  const int port = server.peers.listen("127.0.0.1", 0);
  Link at = 0, from = 0;
};

TEST_F(PeersTest, MessagesOfAllSizesComeInOrder) {
  join();
  EXPECT_EQ(client.opened[at], address());
  EXPECT_EQ(server.opened[from].host, "127.0.0.1");
  std::vector<std::string> up, down;
  for (size_t bytes : {0u, 1u, 2u, 3u, 55u, 56u, 63u, 64u, 65u, 4095u, 65515u, 65516u, 65517u,
                       262144u, 1048575u, 1048576u, 0u, 5u}) {
    up.push_back(message_of(bytes, up.size()));
    down.push_back(message_of(bytes, 1000 + down.size()));
  }
  for (size_t i = 0; i < 300; ++i) up.push_back(message_of(i % 70, 2000 + i));
  for (const std::string& message : up) client.peers.send(at, message);
  for (const std::string& message : down) server.peers.send(from, message);
  ASSERT_TRUE(run_until(io, [&] {
    return server.received[from].size() >= up.size() && client.received[at].size() >= down.size();
  }));
  EXPECT_TRUE(server.received[from] == up);
  EXPECT_TRUE(client.received[at] == down);
  EXPECT_EQ(server.peers.num_links(), 1);
  EXPECT_TRUE(client.lost.empty() && server.lost.empty());
}

TEST_F(PeersTest, ManyMessagesComeInOrderWhileOthersAreSent) {
  join();
  constexpr int kCount = 3000;
  for (int i = 0; i < kCount; ++i) {
    client.peers.send(at, message_of(size_t(i * 37 % 3001), uint64_t(i)));
    server.peers.send(from, message_of(size_t(i * 91 % 2999), uint64_t(i)));
    if (i % 7 == 0) io.poll();
  }
  ASSERT_TRUE(run_until(io, [&] {
    return server.received[from].size() >= kCount && client.received[at].size() >= kCount;
  }));
  for (size_t i = 0; i < kCount; ++i) {
    ASSERT_TRUE(server.received[from][i] == message_of(i * 37 % 3001, i)) << i;
    ASSERT_TRUE(client.received[at][i] == message_of(i * 91 % 2999, i)) << i;
  }
}

TEST_F(PeersTest, WhatIsSentBeforeTheLinkIsOpenComesFirst) {
  std::unique_ptr<Peers> peers;
  peers = std::make_unique<Peers>(
      io, kSecret,
      Peers::Handlers{[&](Link link, const Address&) { peers->send(link, "three"); },
                      [](Link, std::string_view) {},
                      [&](Link, Peers::Loss, const std::string&) { ADD_FAILURE(); },
                      [](const std::string&, const char*, int) {}});
  at = peers->connect({address()}, 60s);
  peers->send(at, "one");
  peers->send(at, "two");
  EXPECT_EQ(peers->num_links(), 0);
  ASSERT_TRUE(run_until(io, [&] { return server.received[server.last].size() == 3; }));
  EXPECT_EQ(server.received[server.last], (std::vector<std::string>{"one", "two", "three"}));
  EXPECT_EQ(peers->num_links(), 1);
}

TEST_F(PeersTest, AnAgentMayConnectToItself) {
  const Link mine = server.peers.connect({address()}, 60s);
  ASSERT_TRUE(run_until(io, [&] { return server.opened.size() == 2; }));
  Link other = 0;
  for (const auto& [link, address] : server.opened)
    if (link != mine) other = link;
  server.peers.send(mine, "there");
  server.peers.send(other, "and back");
  ASSERT_TRUE(run_until(
      io, [&] { return !server.received[mine].empty() && !server.received[other].empty(); }));
  EXPECT_EQ(server.received[other][0], "there");
  EXPECT_EQ(server.received[mine][0], "and back");
}

TEST_F(PeersTest, TooLongMessagesAreBugsAndLinksThatEndedTakeNone) {
  join();
  EXPECT_THROW(client.peers.send(at, std::string(Peers::kMaxMessageBytes + 1, 'x')), BugError);
  client.peers.close(at);
  client.peers.send(at, "late");
  client.peers.send(999, "to nobody");
  ASSERT_TRUE(run_until(io, [&] { return server.lost.contains(from); }));
  EXPECT_TRUE(server.received.empty());
}

TEST_F(PeersTest, CloseDeliversWhatWasQueued) {
  join();
  std::vector<std::string> sent;
  for (size_t i = 0; i < 6; ++i) sent.push_back(message_of(100'000, i));  // a few writes, in 1 s
  for (const std::string& message : sent) client.peers.send(at, message);
  for (size_t i = 0; i < 4; ++i) server.peers.send(from, sent[i]);
  client.peers.close(at);
  EXPECT_EQ(client.peers.num_links(), 0);
  ASSERT_TRUE(run_until(io, [&] { return server.lost.contains(from); }));
  EXPECT_TRUE(server.received[from] == sent);
  EXPECT_EQ(server.lost[from].loss, Loss::kClosed) << server.lost[from].why;
  run_until(
      io, [] { return false; }, 50ms);
  EXPECT_TRUE(client.lost.empty());
  EXPECT_TRUE(client.received.empty());
}

// A plain close() would answer what comes afterwards with a reset, and drop what has not arrived.
TEST_F(PeersTest, CloseDeliversToAPeerThatSendsMeanwhile) {
  Wire peer(io, port);
  ByHand hand = prove(peer);
  ASSERT_TRUE(run_until(io, [&] { return !server.opened.empty(); }));
  for (size_t i = 0; i < 8; ++i) server.peers.send(server.last, message_of(100'000, i));
  server.peers.close(server.last);
  ASSERT_TRUE(run_until(io, [&] {
    ::send(peer.fd(), "x", 1, MSG_NOSIGNAL | MSG_DONTWAIT);
    char c[10'000];
    const ssize_t n = ::recv(peer.fd(), c, sizeof c, MSG_DONTWAIT);
    if (n > 0) hand.open.take({c, size_t(n)});
    return n == 0 || (n < 0 && errno != EAGAIN);
  }));
  std::string_view body;
  size_t count = 0;
  for (; hand.open.next(body) == frames::Opener::Found::kBody; ++count)
    EXPECT_TRUE(body == message_of(100'000, count));
  EXPECT_EQ(count, 8u);
  EXPECT_FALSE(hand.open.within_frame());
  EXPECT_TRUE(server.received.empty());
}

TEST_F(PeersTest, CloseDoesNotWaitLongForAPeerThatDoesNotRead) {
  Wire peer(io, port);
  prove(peer);
  ASSERT_TRUE(run_until(io, [&] { return !server.opened.empty(); }));
  for (int i = 0; i < 15; ++i) server.peers.send(server.last, message_of(1 << 20, 1));
  const auto start = std::chrono::steady_clock::now();
  server.peers.close(server.last);
  // The kernel drops what the peer sends to a socket that is closed, and answers with a reset.
  ASSERT_TRUE(run_until(io, [&] {
    return ::send(peer.fd(), "x", 1, MSG_NOSIGNAL | MSG_DONTWAIT) < 0 && errno != EAGAIN;
  }));
  EXPECT_GE(std::chrono::steady_clock::now() - start, 900ms);
  EXPECT_TRUE(server.lost.empty());
}

TEST_F(PeersTest, ACloseIsReportedOnTheOtherSideAlone) {
  join();
  server.peers.close(from);
  ASSERT_TRUE(run_until(io, [&] { return client.lost.contains(at); }));
  EXPECT_EQ(client.lost[at].loss, Loss::kClosed);
  EXPECT_TRUE(server.lost.empty());
  EXPECT_EQ(client.peers.num_links(), 0);
}

TEST_F(PeersTest, AResetIsAnEnd) {
  Wire peer(io, port);
  prove(peer);
  ASSERT_TRUE(run_until(io, [&] { return !server.opened.empty(); }));
  const linger hard{1, 0};
  ::setsockopt(peer.fd(), SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
  { const Wire gone(std::move(peer)); }
  ASSERT_TRUE(run_until(io, [&] { return !server.lost.empty(); }));
  EXPECT_EQ(server.lost[server.last].loss, Loss::kClosed) << server.lost[server.last].why;
}

// Also where a write finds the end first.
TEST_F(PeersTest, WhatCameBeforeAResetIsReceived) {
  {
    Wire peer(io, port);
    ByHand hand = prove(peer);
    ASSERT_TRUE(run_until(io, [&] { return !server.opened.empty(); }));
    server.peers.send(server.last, "not read, which makes the close a reset");
    // Until it is written, so that the next write is the one that finds the end.
    run_until(
        io, [] { return false; }, 20ms);
    std::string bytes;
    for (int i = 0; i < 5; ++i) hand.seal.seal("message", bytes);
    peer.send(bytes);
  }
  server.peers.send(server.last, "too late");
  ASSERT_TRUE(run_until(io, [&] { return !server.lost.empty(); }));
  EXPECT_EQ(server.received[server.last].size(), 5u);
  EXPECT_EQ(server.lost[server.last].loss, Loss::kClosed) << server.lost[server.last].why;
}

TEST_F(PeersTest, NothingComesAfterACloseWithinAHandler) {
  int count = 0;
  std::unique_ptr<Peers> peers;
  peers = std::make_unique<Peers>(
      io, kSecret,
      Peers::Handlers{[](Link, const Address&) {},
                      [&](Link link, std::string_view) {
                        ++count;
                        peers->close(link);
                      },
                      [&](Link, Peers::Loss, const std::string&) { ADD_FAILURE(); },
                      [](const std::string&, const char*, int) {}});
  Wire peer(io, peers->listen("127.0.0.1", 0));
  ByHand hand = prove(peer);
  std::string bytes;
  for (int i = 0; i < 5; ++i) hand.seal.seal("message", bytes);
  peer.send(bytes);
  EXPECT_TRUE(peer.closes());
  EXPECT_EQ(count, 1);
}

TEST_F(PeersTest, APeerThatDoesNotReadIsSilent) {
  Wire peer(io, port);
  prove(peer);
  ASSERT_TRUE(run_until(io, [&] { return !server.opened.empty(); }));
  const Link link = server.last;
  // As many as may be queued before the loop runs again.
  for (int i = 0; i < 15; ++i) server.peers.send(link, std::string(1 << 20, 'x'));
  int sent = 15;
  EXPECT_FALSE(run_until(
      io, [&] { return !server.lost.empty(); }, 50ms));
  for (; server.lost.empty() && sent < 200; ++sent) {
    server.peers.send(link, std::string(1 << 20, 'x'));
    run_until(
        io, [&] { return !server.lost.empty(); }, 20ms);
  }
  EXPECT_GT(sent, 15);
  EXPECT_LT(sent, 60) << "besides 16 MiB, what the kernel takes";
  ASSERT_TRUE(server.lost.contains(link));
  EXPECT_EQ(server.lost[link].loss, Loss::kSilent);
  EXPECT_NE(server.lost[link].why.find("16 MiB"), std::string::npos) << server.lost[link].why;
  EXPECT_EQ(server.peers.num_links(), 0);
}

// What has been sent does not count.
TEST_F(PeersTest, APeerThatReadsMayBeSentAnyAmount) {
  join();
  for (size_t i = 1; i <= 18; ++i) {
    client.peers.send(at, message_of(1 << 20, i));
    ASSERT_TRUE(run_until(io, [&] { return server.received[from].size() == i; }));
  }
  EXPECT_TRUE(client.lost.empty());
}

// Each message takes memory even if it is empty.
TEST_F(PeersTest, EmptyMessagesCountToo) {
  join();
  for (int i = 0; i < 300'000; ++i) client.peers.send(at, "");
  ASSERT_TRUE(run_until(io, [&] { return !client.lost.empty(); }));
  EXPECT_EQ(client.lost[at].loss, Loss::kSilent);
}

TEST_F(PeersTest, ALinkThatIsNotOpenYetTakesNoMoreThanOthers) {
  const Door silent;
  at = client.peers.connect({silent.address()}, 60s);
  const Link other = client.peers.connect({address()}, 60s);
  for (int i = 0; i < 40; ++i) client.peers.send(other, std::string(1 << 20, 'x'));
  ASSERT_TRUE(run_until(io, [&] { return client.lost.contains(other); }));
  EXPECT_EQ(client.lost[other].loss, Loss::kSilent);
  EXPECT_TRUE(client.opened.contains(other));
}

TEST_F(PeersTest, SaysThatNothingListens) {
  Door door;
  door.close();
  at = client.peers.connect({door.address()}, 60s);
  EXPECT_TRUE(client.lost.empty()) << "handlers are not called within connect()";
  const auto start = std::chrono::steady_clock::now();
  ASSERT_TRUE(run_until(io, [&] { return client.lost.contains(at); }));
  EXPECT_LT(std::chrono::steady_clock::now() - start, 30s);
  EXPECT_EQ(client.lost[at].loss, Loss::kRefused);
  EXPECT_EQ(client.lost[at].why, "connection refused");
}

TEST_F(PeersTest, WhoDoesNotAnswerIsSilentAtTheLimit) {
  const Door silent;  // the kernel connects, nobody answers
  // And one whose queue is full, so that the kernel does not connect either.
  const Door full(0);
  std::vector<Wire> queue;
  for (int i = 0; i < 2; ++i) {
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    sockaddr_in to{AF_INET, htons(uint16_t(full.port())), {htonl(INADDR_LOOPBACK)}, {}};
    ::connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof to);
    queue.emplace_back(io, Wire::Accepted{fd});
  }
  const auto start = std::chrono::steady_clock::now();
  const Link one = client.peers.connect({silent.address()}, 600ms);
  const Link two = client.peers.connect({full.address()}, 600ms);
  const Link three = client.peers.connect({silent.address(), full.address()}, 600ms);
  const Link slow = client.peers.connect({silent.address()}, 60s);
  ASSERT_TRUE(run_until(io, [&] { return client.lost.size() == 3; }));
  EXPECT_GE(std::chrono::steady_clock::now() - start, 600ms);
  for (Link link : {one, two}) {
    EXPECT_EQ(client.lost[link].loss, Loss::kSilent);
    EXPECT_EQ(client.lost[link].why, "no answer within 0.6 s");
  }
  const std::string both = "127.0.0.1:" + std::to_string(silent.port()) +
                           ": no answer within 0.6 s; 127.0.0.1:" + std::to_string(full.port()) +
                           ": no answer within 0.6 s";
  EXPECT_EQ(client.lost[three].why, both);
  ASSERT_TRUE(run_until(io, [&] { return client.lost.contains(slow); }));
  EXPECT_GE(std::chrono::steady_clock::now() - start, 5s);
  EXPECT_EQ(client.lost[slow].loss, Loss::kSilent);
  EXPECT_EQ(client.lost[slow].why, "did not prove itself within 5 s");
}

TEST_F(PeersTest, AddressesThatCannotBe) {
  const Link none = client.peers.connect({}, 60s);
  const Link zero = client.peers.connect({{"127.0.0.1", 0}}, 60s);
  const Link high = client.peers.connect({{"127.0.0.1", 65536 + port}}, 60s);
  const Link name = client.peers.connect({{"no-such-host.invalid", port}}, 3s);
  const Link good = client.peers.connect({{"127.0.0.1", -1}, {"localhost", port}}, 60s);
  EXPECT_TRUE(client.lost.empty()) << "handlers are not called within connect()";
  ASSERT_TRUE(run_until(io, [&] { return client.lost.size() == 4 && client.opened.size() == 1; }));
  for (Link link : {none, zero, high, name}) EXPECT_EQ(client.lost[link].loss, Loss::kSilent);
  EXPECT_EQ(client.lost[zero].why, "is no port");
  EXPECT_TRUE(client.opened.contains(good));
}

TEST_F(PeersTest, TheFirstAddressThatProvesItselfWins) {
  const Door silent;
  Door refused;
  refused.close();
  Agent stranger(io, "another secret of the tests");
  const int strangers = stranger.peers.listen("127.0.0.1", 0);
  at = client.peers.connect({refused.address(),
                             {"127.0.0.1", strangers},
                             silent.address(),
                             address(),
                             {"localhost", port},
                             address()},
                            60s);
  ASSERT_TRUE(run_until(io, [&] { return !client.opened.empty() && !server.opened.empty(); }));
  client.peers.send(at, "hello");
  ASSERT_TRUE(run_until(io, [&] { return !server.received[server.last].empty(); }));
  // The others are closed before they have proved anything, of which nobody is told.
  run_until(
      io, [] { return false; }, 300ms);
  EXPECT_EQ(client.peers.num_links(), 1);
  EXPECT_EQ(server.peers.num_links(), 1);
  EXPECT_TRUE(client.lost.empty() && server.lost.empty());
  EXPECT_TRUE(server.turned_away.empty());
}

TEST_F(PeersTest, WhereAllAddressesFailTheTellingOneCounts) {
  const Door silent;
  Door refused;
  refused.close();
  Agent stranger(io, "another secret of the tests");
  const Address strangers{"127.0.0.1", stranger.peers.listen("127.0.0.1", 0)};
  const Link one = client.peers.connect({silent.address(), refused.address()}, 500ms);
  const Link two = client.peers.connect({strangers, refused.address()}, 60s);
  ASSERT_TRUE(run_until(io, [&] { return client.lost.size() == 2; }));
  EXPECT_EQ(client.lost[one].loss, Loss::kRefused) << client.lost[one].why;
  EXPECT_EQ(client.lost[two].loss, Loss::kStranger) << client.lost[two].why;
  for (const Address& address : {refused.address(), strangers})
    EXPECT_NE(client.lost[two].why.find(to_string(address) + ": "), std::string::npos)
        << client.lost[two].why;
}

// With connections in every state.
TEST_F(PeersTest, ThatEndSayNothing) {
  const Door silent;
  Door refused;
  refused.close();
  Agent other(io);
  int calls = 0;
  auto peers = std::make_unique<Peers>(
      io, kSecret,
      Peers::Handlers{[&](Link, const Address&) { ++calls; },
                      [&](Link, std::string_view) { ++calls; },
                      [&](Link, Peers::Loss, const std::string&) { ++calls; },
                      [&](const std::string&, const char*, int) { ++calls; }});
  const int its_port = peers->listen("", 0);
  Wire stranger(io, its_port), half(io, its_port);
  half.send("TSAg");
  const Link link = peers->connect({address()}, 60s);
  const Link there = other.peers.connect({{"127.0.0.1", its_port}}, 60s);
  ASSERT_TRUE(run_until(io, [&] { return calls == 2; }));
  peers->connect({silent.address(), {"localhost", silent.port()}}, 100ms);
  peers->connect({refused.address()}, 60s);
  peers->connect({{"no-such-host.invalid", 1}}, 60s);
  peers->connect({}, 60s);
  other.peers.send(there, "message");
  peers->send(link, message_of(1 << 20, 1));
  peers->close(link);
  peers.reset();
  ASSERT_TRUE(run_until(io, [&] { return !other.lost.empty() && !server.lost.empty(); }));
  EXPECT_TRUE(stranger.closes() && half.closes());
  run_until(
      io, [] { return false; }, 300ms);
  EXPECT_EQ(calls, 2);
  const Link late = other.peers.connect({{"127.0.0.1", its_port}}, 60s);
  ASSERT_TRUE(run_until(io, [&] { return other.lost.contains(late); }));
  EXPECT_EQ(other.lost[late].loss, Loss::kRefused) << other.lost[late].why;
  EXPECT_EQ(other.lost[there].loss, Loss::kClosed);
}

// Each handler may be the last thing that Peers does.
TEST_F(PeersTest, MayEndWithinAHandler) {
  for (const std::string at : {"opened", "received", "lost", "turned_away"}) {
    SCOPED_TRACE(at);
    std::unique_ptr<Peers> peers;
    bool is_over = false;
    const auto end = [&](const std::string& handler) {
      EXPECT_FALSE(is_over) << handler;
      if (handler != at) return;
      is_over = true;
      peers.reset();
    };
    peers = std::make_unique<Peers>(
        io, kSecret,
        Peers::Handlers{[&](Link, const Address&) { end("opened"); },
                        [&](Link, std::string_view) { end("received"); },
                        [&](Link, Peers::Loss, const std::string&) { end("lost"); },
                        [&](const std::string&, const char*, int) { end("turned_away"); }});
    const int its_port = peers->listen("127.0.0.1", 0);
    Agent agent(io);
    const Link link = agent.peers.connect({{"127.0.0.1", its_port}}, 60s);
    for (int i = 0; i < 3; ++i) agent.peers.send(link, "message");
    if (at == "lost") {
      ASSERT_TRUE(run_until(io, [&] { return !agent.opened.empty(); }));
      agent.peers.close(link);
    }
    Wire stranger(io, its_port);
    if (at == "turned_away") stranger.send("GET / HTTP/1.1\r\n");
    ASSERT_TRUE(run_until(io, [&] { return is_over; }));
    if (at == "lost") continue;
    ASSERT_TRUE(run_until(io, [&] { return !agent.lost.empty(); }));
  }
}

TEST_F(PeersTest, ClosedDialsAreNotReported) {
  const Door silent;
  const Link link = client.peers.connect({silent.address(), address()}, 300ms);
  client.peers.close(link);
  client.peers.close(link);
  run_until(
      io, [] { return false; }, 500ms);
  EXPECT_TRUE(client.lost.empty());
  EXPECT_TRUE(client.opened.empty());
}

TEST_F(PeersTest, ListensOnAllAddresses) {
  Agent all(io);
  const int its_port = all.peers.listen("", 0);
  std::vector<Address> addresses = {{"127.0.0.1", its_port}, {"localhost", its_port}};
  if (std::ifstream("/proc/net/if_inet6").peek() != EOF) addresses.push_back({"::1", its_port});
  for (size_t i = 0; i < addresses.size(); ++i) {
    SCOPED_TRACE(to_string(addresses[i]));
    client.peers.connect({addresses[i]}, 60s);
    ASSERT_TRUE(run_until(io, [&] { return all.opened.size() == i + 1 || !client.lost.empty(); }));
    ASSERT_TRUE(client.lost.empty()) << client.lost.begin()->second.why;
  }
  EXPECT_EQ(all.opened.begin()->second.host, "127.0.0.1");
}

TEST_F(PeersTest, SaysWhyItCannotListen) {
  const auto said = [&](const std::string& host, int wanted) {
    Agent agent(io);
    try {
      agent.peers.listen(host, wanted);
    } catch (const UserError& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  const std::string pid = "is used by pid " + std::to_string(::getpid());
  EXPECT_NE(said("127.0.0.1", port).find(pid), std::string::npos) << said("127.0.0.1", port);
  EXPECT_NE(said("", port).find(pid), std::string::npos) << said("", port);
  EXPECT_NE(said("192.0.2.1", 0).find("cannot listen on 192.0.2.1"), std::string::npos);
  EXPECT_NE(said("127.0.0.1", 65536).find("is no port"), std::string::npos);
  EXPECT_NE(said("no-such-host.invalid", 0).find("does not resolve"), std::string::npos);
}

TEST(Address, AsText) {
  EXPECT_EQ(to_string(Address{"node1", 29500}), "node1:29500");
  EXPECT_EQ(to_string(Address{"10.0.0.1", 1}), "10.0.0.1:1");
  EXPECT_EQ(to_string(Address{"fe80::1", 29500}), "[fe80::1]:29500");
}

}  // namespace
}  // namespace tessera::testing
