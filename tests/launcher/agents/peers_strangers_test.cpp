// Agents against strangers: other secrets, garbage, silence, crowds, and whoever changes what
// agents say to one another.
#include <sys/resource.h>

#include <ctime>
#include <fstream>
#include <random>

#include "tests/launcher/agents/agents.h"

namespace tessera::testing {
namespace {

using namespace std::chrono_literals;
using Loss = Peers::Loss;
constexpr const char* kNoProtocol = "sent what is not the protocol";
constexpr const char* kNoSecret = "does not know the secret";
constexpr const char* kSlow = "did not prove itself within 5 s";
constexpr const char* kRoom = "was closed to make room for others";

class Strangers : public ::testing::Test {
 protected:
  Address address() const { return {"127.0.0.1", port}; }
  void expect_alive() {
    Agent agent(io);
    const Link before = server.last, link = agent.peers.connect({address()}, 60s);
    agent.peers.send(link, "alive");
    ASSERT_TRUE(run_until(
        io, [&] { return server.last != before && server.received[server.last].size() == 1; }));
    EXPECT_EQ(server.received[server.last][0], "alive");
  }
  bool turned_away(const char* what, int count) {
    return run_until(io, [&] { return server.count_turned_away(what) >= count; });
  }

  boost::asio::io_context io;
  Agent server{io};
  const int port = server.peers.listen("127.0.0.1", 0);
};

TEST_F(Strangers, WithAnotherSecretAreKnownOnBothSides) {
  Agent client(io, "another secret of the tests");
  const Link link = client.peers.connect({address()}, 60s);
  client.peers.send(link, "not for you");
  ASSERT_TRUE(run_until(io, [&] { return client.lost.contains(link); }));
  EXPECT_EQ(client.lost[link].loss, Loss::kStranger) << client.lost[link].why;
  EXPECT_EQ(client.lost[link].why, "has another secret");
  ASSERT_TRUE(turned_away(kNoSecret, 1));
  EXPECT_EQ(server.turned_away[0].source, "127.0.0.1");
  EXPECT_TRUE(client.opened.empty() && server.opened.empty() && server.lost.empty());
  expect_alive();
}

TEST_F(Strangers, CannotProveThemselvesByWhatTheyHear) {
  const std::string nonce(wire::kNonceBytes, 'n');
  Wire peer(io, port);
  peer.send(std::string(frames::kMagic) + nonce);
  const std::string answer = peer.receive(frames::kAnswerBytes);
  peer.send(answer.substr(frames::kHelloBytes));  // its own proof
  EXPECT_TRUE(peer.closes());
  EXPECT_TRUE(turned_away(kNoSecret, 1));
  // The roles of the store's protocol are others, should a job use one secret for both.
  Wire other(io, port);
  other.send(std::string(frames::kMagic) + nonce);
  const std::string again = other.receive(frames::kAnswerBytes);
  other.send(frames::proof("client", kSecret, nonce,
                           again.substr(frames::kMagic.size(), wire::kNonceBytes)));
  EXPECT_TRUE(other.closes());
  EXPECT_EQ(server.peers.num_links(), 0);
  EXPECT_TRUE(server.opened.empty());
}

TEST_F(Strangers, CannotServeWithoutTheSecret) {
  Agent client(io);
  Door door;
  const Link link = client.peers.connect({door.address()}, 60s);
  Wire wire = door.accept(io);
  const std::string hello = wire.receive(frames::kHelloBytes);
  const std::string nonce(wire::kNonceBytes, 's');
  wire.send(std::string(frames::kMagic) + nonce +
            frames::proof(frames::kServer, "another secret of the tests",
                          hello.substr(frames::kMagic.size()), nonce));
  ASSERT_TRUE(run_until(io, [&] { return client.lost.contains(link); }));
  EXPECT_EQ(client.lost[link].loss, Loss::kStranger) << client.lost[link].why;
  const std::string ours = wire.receive(100);
  ASSERT_EQ(ours.size(), wire::kProofBytes);
  EXPECT_NE(ours,
            frames::proof(frames::kClient, kSecret, hello.substr(frames::kMagic.size()), nonce))
      << "the client proves itself to no stranger";
  EXPECT_TRUE(client.opened.empty());
}

TEST_F(Strangers, OfOtherProtocolsAreKnownByTheirFirstBytes) {
  Agent client(io);
  Door door;
  for (const std::string words : {"SSH-2.0-OpenSSH_9.2\r\n", "HTTP/1.1 400 Bad Request\r\n\r\n",
                                  "TSAgent2", "T\n", "TSStore1"}) {
    SCOPED_TRACE(words);
    const Link link = client.peers.connect({door.address()}, 60s);
    Wire wire = door.accept(io);
    wire.send(words);
    ASSERT_TRUE(run_until(
        io, [&] { return client.lost.contains(link); }, 4s))
        << "of 5 s";
    EXPECT_EQ(client.lost[link].loss, Loss::kStranger) << client.lost[link].why;
  }
  const Link link = client.peers.connect({door.address()}, 60s);
  { const Wire wire = door.accept(io); }
  ASSERT_TRUE(run_until(io, [&] { return client.lost.contains(link); }));
  EXPECT_EQ(client.lost[link].loss, Loss::kClosed) << client.lost[link].why;
}

// The first of a kind at once, the others after 10 s.
TEST_F(Strangers, AreCountedByKind) {
  Wire silent(io, port), half(io, port), drip(io, port);
  half.send(std::string(frames::kMagic) + "half");
  const auto start = std::chrono::steady_clock::now();
  const std::string words[] = {
      "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
      std::string("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11) + std::string(100, 'r'),
      std::string(64, '\0'),
      std::string(100000, '\xff'),
      "TSAgent2",
      "X"};
  for (const std::string& word : words) {
    Wire peer(io, port);
    peer.send(word);
    EXPECT_TRUE(peer.closes());
  }
  for (int i = 0; i < 3; ++i) {  // half a hello and an end
    Wire peer(io, port);
    peer.send("TSAgent1abc");
    peer.end_of_sending();
    EXPECT_TRUE(peer.closes());
  }
  {
    Wire peer(io, port);  // an end without a word, as a health check, is no offence
    peer.end_of_sending();
    EXPECT_TRUE(peer.closes());
  }
  ASSERT_EQ(server.turned_away.size(), 1u);
  EXPECT_EQ(server.turned_away[0].count, 1);
  EXPECT_EQ(server.turned_away[0].what, std::string(kNoProtocol));
  for (char c : frames::kMagic) {  // the time is that of all its bytes
    drip.send({&c, 1});
    run_until(
        io, [&] { return drip.is_closed(); }, 400ms);
  }
  EXPECT_TRUE(silent.closes() && half.closes() && drip.closes());
  EXPECT_GE(std::chrono::steady_clock::now() - start, 5s);
  ASSERT_TRUE(turned_away(kSlow, 3));
  ASSERT_TRUE(turned_away(kNoProtocol, 9));
  EXPECT_GE(std::chrono::steady_clock::now() - start, 10s);
  ASSERT_EQ(server.turned_away.size(), 4u);
  for (const Agent::Turned& turned : server.turned_away) EXPECT_EQ(turned.source, "127.0.0.1");
  EXPECT_EQ(server.count_turned_away(kSlow), 3);
  EXPECT_EQ(server.count_turned_away(kNoProtocol), 9);
  EXPECT_TRUE(server.opened.empty() && server.lost.empty());
  expect_alive();
}

TEST_F(Strangers, AHandshakeMayComeByteByByte) {
  const std::string nonce(wire::kNonceBytes, 'n');
  Wire peer(io, port);
  for (char c : std::string(frames::kMagic) + nonce) peer.send({&c, 1});
  const std::string answer = peer.receive(frames::kAnswerBytes);
  const std::string theirs = answer.substr(frames::kMagic.size(), wire::kNonceBytes);
  EXPECT_EQ(answer.substr(frames::kHelloBytes),
            frames::proof(frames::kServer, kSecret, nonce, theirs));
  std::string rest = frames::proof(frames::kClient, kSecret, nonce, theirs);
  frames::Sealer sealer(frames::session_key(kSecret, nonce, theirs), frames::Direction::kToServer);
  sealer.seal("by bytes", rest);
  for (char c : rest) {
    peer.send({&c, 1});
    io.poll();
  }
  ASSERT_TRUE(run_until(io, [&] { return !server.received[server.last].empty(); }));
  EXPECT_EQ(server.received[server.last][0], "by bytes");
}

size_t resident_kib() {
  std::ifstream file("/proc/self/status");
  std::string name;
  for (size_t value; file >> name;)
    if (name == "VmRSS:" && file >> value) return value;
  return 0;
}

TEST_F(Strangers, ACrowdDisturbsNoLink) {
  rlimit files{};
  ::getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &files);
  Agent client(io);
  const Link link = client.peers.connect({address()}, 60s);
  ASSERT_TRUE(run_until(io, [&] { return !server.opened.empty() && !client.opened.empty(); }));
  const Link other = server.last;
  const size_t before = resident_kib();
  constexpr size_t kCrowd = 2000;
  std::vector<Wire> crowd;
  size_t sent = 0;
  for (size_t i = 0; i < kCrowd; ++i) {
    crowd.emplace_back(io, port);
    if (i % 2) continue;
    client.peers.send(link, message_of(i % 999, i));
    server.peers.send(other, message_of(i % 888, i));
    ++sent;
    io.poll();
  }
  ASSERT_TRUE(run_until(io, [&] {
    return server.received[other].size() >= sent && client.received[link].size() >= sent;
  }));
  for (size_t i = 0; i < sent; ++i) {
    ASSERT_TRUE(server.received[other][i] == message_of(2 * i % 999, 2 * i));
    ASSERT_TRUE(client.received[link][i] == message_of(2 * i % 888, 2 * i));
  }
  EXPECT_TRUE(server.lost.empty() && client.lost.empty());
  // The oldest were closed, at the latest when others came.
  EXPECT_TRUE(run_until(io, [&] {
    size_t closed = 0;
    for (Wire& peer : crowd) closed += peer.is_closed();
    return closed >= kCrowd - 256;
  }));
  EXPECT_TRUE(crowd[0].is_closed());
  EXPECT_GE(server.count_turned_away(kRoom), 1);
  EXPECT_LT(resident_kib(), before + 48 * 1024);
  expect_alive();
}

// Those that wait for a file are accepted in their turn, since others are closed for them.
TEST_F(Strangers, WithoutFilesOthersMakeRoom) {
  Agent client(io);
  const Link link = client.peers.connect({address()}, 60s);
  ASSERT_TRUE(run_until(io, [&] { return !server.opened.empty() && !client.opened.empty(); }));
  const Link other = server.last;
  std::vector<Wire> crowd;
  for (int i = 0; i < 30; ++i) crowd.emplace_back(io, port);
  Wire late(io, port);
  rlimit before{};
  ::getrlimit(RLIMIT_NOFILE, &before);
  const int next = ::dup(late.fd());
  ::close(next);
  rlimit few = before;
  few.rlim_cur = rlim_t(next) + 4;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  const clock_t start = std::clock();
  const Link none = client.peers.connect({address()}, 300ms);  // no file for it either
  prove(late);
  EXPECT_TRUE(run_until(io, [&] { return server.last != other && client.lost.contains(none); }));
  EXPECT_LT(double(std::clock() - start) / CLOCKS_PER_SEC, 0.3) << "it spins";
  ::setrlimit(RLIMIT_NOFILE, &before);
  client.peers.send(link, "still there");
  ASSERT_TRUE(run_until(io, [&] { return !server.received[other].empty(); }));
  EXPECT_TRUE(turned_away(kRoom, 1));
  EXPECT_TRUE(server.lost.empty());
  expect_alive();
}

// Stands between two agents: what the server sends passes, what the client sends after its
// handshake is held.
class Between : public Strangers {
 protected:
  void SetUp() override {
    at = client.peers.connect({door.address()}, 60s);
    left.emplace(door.accept(io));
    right.emplace(io, port);
    hello = left->receive(frames::kHelloBytes);
    right->send(hello);
    left->send(right->receive(frames::kAnswerBytes));
    proof = left->receive(wire::kProofBytes);
    right->send(proof);
    ASSERT_TRUE(run_until(io, [&] { return !client.opened.empty() && !server.opened.empty(); }));
    from = server.last;
    for (const std::string& message : messages) {
      client.peers.send(at, message);
      frame.push_back(left->receive(4 + message.size() + frames::kCodeBytes));
    }
  }
  // Sends `bytes` and expects the first `whole` messages and an end of the link, in its reason
  // `why`.
  void expect_end(const std::string& bytes, size_t whole, Loss loss, const std::string& why) {
    right->send(bytes);
    ASSERT_TRUE(run_until(io, [&] { return server.lost.contains(from); }));
    const std::vector<std::string> first(messages.begin(), messages.begin() + long(whole));
    EXPECT_EQ(server.received[from], first);
    EXPECT_EQ(server.lost[from].loss, loss);
    EXPECT_EQ(server.lost[from].why, why);
    EXPECT_TRUE(right->closes());
    expect_alive();
  }
  void expect_changed(const std::string& bytes, size_t whole) {
    expect_end(bytes, whole, Loss::kStranger, "sent a message that was changed on its way");
  }

  const std::vector<std::string> messages = {"one", "two", "the third of them", ""};
  Agent client{io};
  Door door;
  std::optional<Wire> left, right;
  Link at = 0, from = 0;
  std::string hello, proof;
  std::vector<std::string> frame;
};

TEST_F(Between, WhatIsNotChangedArrives) {
  right->send(frame[0] + frame[1] + frame[2] + frame[3]);
  ASSERT_TRUE(run_until(io, [&] { return server.received[from].size() == 4; }));
  EXPECT_EQ(server.received[from], messages);
  EXPECT_TRUE(server.lost.empty());
}

TEST_F(Between, ABitOfABody) {
  frame[1][5] ^= 1;
  expect_changed(frame[0] + frame[1] + frame[2], 1);
}

TEST_F(Between, ABitOfACode) {
  frame[2].back() = char(frame[2].back() ^ 0x80);
  expect_changed(frame[0] + frame[1] + frame[2] + frame[3], 2);
}

TEST_F(Between, ABitOfALength) {
  frame[0][0] ^= 2;  // 3 bytes to 1
  expect_changed(frame[0] + frame[1], 0);
}

TEST_F(Between, ALengthBeyondTheLimit) {
  expect_changed(frame[0] + std::string("\x01\x00\x10\x00", 4), 1);
}

TEST_F(Between, AFrameTwice) { expect_changed(frame[0] + frame[1] + frame[1], 2); }

TEST_F(Between, TwoFramesSwapped) { expect_changed(frame[1] + frame[0], 0); }

TEST_F(Between, AFrameLeftOut) { expect_changed(frame[0] + frame[2], 1); }

TEST_F(Between, AFrameOfNobody) {
  expect_changed(frame[0] + frame[1] + frame[2] + frame[3] + std::string(20, '\0'), 4);
}

TEST_F(Between, AFrameCut) {
  right->send(frame[0] + frame[1].substr(0, frame[1].size() - 1));
  right->end_of_sending();
  expect_end("", 1, Loss::kClosed, "closed the connection within a message");
}

// The number is the same and the key too.
TEST_F(Between, AFrameSentBack) {
  left->send(frame[0]);
  ASSERT_TRUE(run_until(io, [&] { return client.lost.contains(at); }));
  EXPECT_EQ(client.lost[at].loss, Loss::kStranger) << client.lost[at].why;
  EXPECT_TRUE(client.received.empty());
}

TEST_F(Between, AFrameOfAnotherConnection) {
  Wire other(io, port);
  ByHand hand = prove(other);
  std::string bytes;
  hand.seal.seal("one", bytes);
  EXPECT_EQ(bytes.substr(0, 7), frame[0].substr(0, 7));
  expect_changed(bytes, 0);
}

TEST_F(Between, AWholeConnectionTwice) {
  Wire again(io, port);
  again.send(hello);
  again.receive(frames::kAnswerBytes);
  again.send(proof + frame[0]);
  EXPECT_TRUE(again.closes());
  EXPECT_TRUE(turned_away(kNoSecret, 1));
  EXPECT_EQ(server.opened.size(), 1u);
}

// Streams of frames that were changed anywhere give the bodies before the change and nothing else,
// and take no more memory than they have bytes.
TEST(Frames, AHundredThousandChangedStreams) {
  std::mt19937 random(7);
  const auto up_to = [&](size_t n) { return size_t(random() % (n + 1)); };
  const std::string key = message_of(32, 1);
  size_t whole = 0, broken = 0;
  for (int round = 0; round < 100'000; ++round) {
    frames::Sealer sealer(key, frames::Direction::kToServer);
    std::vector<std::string> bodies;
    std::vector<size_t> ends;
    std::string stream;
    for (size_t n = 1 + up_to(2); bodies.size() < n;) {
      bodies.push_back(message_of(up_to(round % 100 == 0 ? 3000 : 40), random()));
      sealer.seal(bodies.back(), stream);
      ends.push_back(stream.size());
    }
    const std::string original = stream;
    for (size_t changes = 1 + up_to(2); changes > 0; --changes) {
      const size_t at = up_to(stream.size()), n = up_to(stream.size() - at);
      switch (random() % 6) {
        case 0:
          if (at < stream.size()) stream[at] = char(stream[at] ^ 1 << random() % 8);
          break;
        case 1: stream.resize(at); break;
        case 2: stream.insert(at, message_of(1 + up_to(30), random())); break;
        case 3: stream.erase(at, n); break;
        case 4: stream.insert(at, stream.substr(up_to(stream.size()), n)); break;
        case 5: stream = message_of(up_to(100), random()) + stream.substr(at); break;
      }
    }
    const size_t same =
        size_t(std::mismatch(stream.begin(), stream.end(), original.begin(), original.end()).first -
               stream.begin());
    size_t expected = 0;
    while (expected < ends.size() && ends[expected] <= same) ++expected;
    frames::Opener opener(key, frames::Direction::kToServer);
    std::string_view rest = stream, body;
    auto found = frames::Opener::Found::kPart;
    size_t given = 0;
    while (!rest.empty()) {
      const size_t n = std::max<size_t>(1, up_to(rest.size()));
      opener.take(rest.substr(0, n));
      rest.remove_prefix(n);
      while ((found = opener.next(body)) == frames::Opener::Found::kBody) {
        ASSERT_LT(given, bodies.size());
        ASSERT_EQ(body, bodies[given++]) << round;
      }
    }
    ASSERT_EQ(given, expected) << round;
    ASSERT_LE(opener.held_bytes(), 2 * stream.size() + 64);
    whole += given;
    broken += found == frames::Opener::Found::kBroken;
    if (found == frames::Opener::Found::kBroken) {
      opener.take(original);  // an end for good
      ASSERT_EQ(opener.next(body), frames::Opener::Found::kBroken);
    }
  }
  EXPECT_GT(whole, 20'000u);
  EXPECT_GT(broken, 50'000u);
}

TEST(Frames, MemoryIsThatOfOneFrame) {
  const std::string key = message_of(32, 1);
  frames::Sealer sealer(key, frames::Direction::kToServer);
  frames::Opener opener(key, frames::Direction::kToServer);
  std::string_view body;
  for (int i = 0; i < 20; ++i) {
    std::string stream;
    sealer.seal(message_of(frames::kMaxBodyBytes, uint64_t(i)), stream);
    size_t given = 0;
    for (size_t at = 0; at < stream.size(); at += 65536) {
      opener.take(std::string_view(stream).substr(at, 65536));
      while (opener.next(body) == frames::Opener::Found::kBody) given += body.size();
      ASSERT_LE(opener.held_bytes(), 2 * (frames::kMaxBodyBytes + 65536));
    }
    ASSERT_EQ(given, frames::kMaxBodyBytes);
  }
  // And of small ones no more than what came last.
  std::string stream;
  sealer.seal("small", stream);
  opener.take(stream);
  EXPECT_LE(opener.held_bytes(), 1u << 18);
  EXPECT_EQ(opener.next(body), frames::Opener::Found::kBody);
  EXPECT_FALSE(opener.within_frame());
}

}  // namespace
}  // namespace tessera::testing
