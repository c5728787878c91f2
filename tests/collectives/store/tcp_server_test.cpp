// The server against strangers: wrong keys, garbage, slow and many connections, broken frames.
#include "collectives/store/tcp_server.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <thread>

#include "collectives/store/tcp_store.h"
#include "collectives/store/wire.h"

namespace tessera {
namespace {

using namespace std::chrono_literals;

/// A raw connection to a server.
class Stranger {
 public:
  explicit Stranger(int port) : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(uint16_t(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int on = 1;
    ::setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    connected_ = ::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
  }
  Stranger(Stranger&& o) : fd_(std::exchange(o.fd_, -1)), connected_(o.connected_) {}
  ~Stranger() {
    if (fd_ >= 0) ::close(fd_);
  }
  bool connected() const { return connected_; }
  void send(std::string_view bytes) { ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL); }
  /// Up to `n` bytes; fewer at the end of the stream or after `timeout_ms`.
  std::string receive(size_t n, int timeout_ms = 3000) {
    std::string bytes;
    pollfd p{fd_, POLLIN, 0};
    while (bytes.size() < n && ::poll(&p, 1, timeout_ms) > 0) {
      char c[4096];
      ssize_t got = ::recv(fd_, c, std::min(sizeof c, n - bytes.size()), 0);
      if (got <= 0) break;
      bytes.append(c, size_t(got));
    }
    return bytes;
  }
  /// True when the server closes the connection within `timeout_ms`.
  bool closed(int timeout_ms = 3000) {
    pollfd p{fd_, POLLIN, 0};
    char c;
    while (::poll(&p, 1, timeout_ms) > 0)
      if (::recv(fd_, &c, 1, 0) <= 0) return true;
    return false;
  }
  /// Goes through the handshake with the right key.
  void prove(const std::string& key) {
    std::string nonce(wire::kNonceBytes, 'n');
    send(std::string(wire::kMagic) + nonce);
    std::string answer = receive(wire::kHelloBytes + wire::kProofBytes);
    ASSERT_EQ(answer.size(), wire::kHelloBytes + wire::kProofBytes);
    detail::Digest d =
        wire::proof("client", key, nonce, answer.substr(wire::kMagic.size(), wire::kNonceBytes));
    send(std::string(d.begin(), d.end()));
  }

 private:
  int fd_;
  bool connected_;
};

class Server : public testing::Test {
 protected:
  void expect_alive() {
    TcpStore store("127.0.0.1", server.port(), key, 5s);
    store.set("alive", "yes");
    EXPECT_EQ(store.get("alive", 1s), "yes");
  }
  const std::string key = make_store_key();
  TcpStoreServer server{"127.0.0.1", 0, key};
};

size_t resident_kib() {
  std::ifstream file("/proc/self/status");
  std::string name;
  for (size_t value; file >> name;)
    if (name == "VmRSS:" && file >> value) return value;
  return 0;
}

TEST_F(Server, RefusesAnotherKey) {
  try {
    TcpStore store("127.0.0.1", server.port(), make_store_key(), 5s);
    FAIL() << "connected with a wrong key";
  } catch (const UserError& e) {
    EXPECT_NE(std::string(e.what()).find("another key"), std::string::npos) << e.what();
  }
  Stranger peer(server.port());
  peer.send(std::string(wire::kMagic) + std::string(wire::kNonceBytes, 'n'));
  std::string answer = peer.receive(wire::kHelloBytes + wire::kProofBytes);
  // The server's own proof, sent back, must not pass for the client's.
  peer.send(answer.substr(wire::kHelloBytes));
  EXPECT_TRUE(peer.closed());
  expect_alive();
}

TEST_F(Server, ClosesStrangersAtTheirFirstWords) {
  for (std::string words :
       {std::string("GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
        std::string("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11) + std::string(100, 'r'),
        std::string(64, '\0'), std::string(100000, '\xff')}) {
    Stranger peer(server.port());
    peer.send(words);
    EXPECT_TRUE(peer.closed());
  }
  Stranger half(server.port());
  half.send(wire::kMagic.substr(0, 4));
  EXPECT_FALSE(half.closed(200)) << "a slow peer has its five seconds";
  expect_alive();
}

TEST_F(Server, ClosesSlowPeers) {
  Stranger slow(server.port());
  auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 40 && !slow.closed(300); ++i) slow.send("T");
  auto spent = std::chrono::steady_clock::now() - start;
  EXPECT_GT(spent, 4s);
  EXPECT_LT(spent, 7s);
}

TEST_F(Server, BrokenFramesCloseTheirConnectionOnly) {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    Stranger peer(server.port());
    peer.prove(key);
    std::string body(1 + random() % 60, '\0');
    for (char& c : body) c = char(random());
    body[0] = char(random() % 12);
    std::string frame(4, '\0');
    frame[0] = char(body.size());
    if (round % 10 == 0) frame = std::string("\xff\xff\xff\x7f", 4);
    if (round % 10 == 1) frame = std::string(4, '\0');
    if (round % 10 == 2) frame = std::string("\x01\x00\x10\x00", 4);  // one byte above the cap
    peer.send(frame + body);
    EXPECT_TRUE(round % 10 >= 3 || peer.closed());
  }
  expect_alive();
}

TEST_F(Server, PeersMayLeaveWhileTheyWait) {
  for (int i = 0; i < 20; ++i) {
    Stranger peer(server.port());
    peer.prove(key);
    wire::Writer request(wire::Op::kWait);
    request.integer(3600'000).list(std::vector<std::string>{"never"});
    peer.send(request.frame());
  }
  for (int i = 0; i < 100 && server.num_connections() > 0; ++i) std::this_thread::sleep_for(20ms);
  EXPECT_EQ(server.num_connections(), 0);
}

TEST_F(Server, TenThousandConnectionsLeaveRoomForRanks) {
  rlimit files{};
  ::getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &files);
  size_t before = resident_kib();
  std::vector<Stranger> crowd;
  for (int i = 0; i < 10000; ++i) {
    Stranger peer(server.port());
    if (i % 3 == 0) peer.send("TSSt");
    if (crowd.size() < 400) crowd.push_back(std::move(peer));
    if (i % 2500 == 0) expect_alive();
  }
  expect_alive();
  EXPECT_LE(server.num_connections(), 300);
  EXPECT_LT(resident_kib(), before + 32 * 1024);
}

// The names that the system gives to the open sockets of this process; no two are equal.
std::set<std::string> open_sockets() {
  std::set<std::string> sockets;
  for (const auto& file : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string what = std::filesystem::read_symlink(file, gone);
    if (!gone && what.starts_with("socket:")) sockets.insert(what);
  }
  return sockets;
}

TEST_F(Server, CallsShareAConnection) {
  TcpStore store("127.0.0.1", server.port(), key, 5s);
  store.set("key", "value");
  const std::set<std::string> before = open_sockets();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(store.get("key", 1s), "value");
  EXPECT_EQ(open_sockets(), before);
}

TEST_F(Server, ClientSaysThatTheServerHasGone) {
  auto other = std::make_unique<TcpStoreServer>("127.0.0.1", 0, key);
  TcpStore store("127.0.0.1", other->port(), key, 5s);
  std::thread stop([&] {
    std::this_thread::sleep_for(50ms);
    other.reset();
  });
  EXPECT_THROW(store.get("never", 60s), CommError);
  stop.join();
}

TEST_F(Server, ASeriesOfLimitedCallsWaitsOnceForAServerThatIsGone) {
  auto other = std::make_unique<TcpStoreServer>("127.0.0.1", 0, key);
  const int port = other->port();
  TcpStore store("127.0.0.1", port, key, 5s);
  other.reset();
  const StoreTimeLimit limit(500ms);
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 10; ++i) EXPECT_THROW(store.num_keys(), CommError);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 3s);  // of 5 s if each one waited
  TcpStoreServer again("127.0.0.1", port, key);
  std::this_thread::sleep_for(500ms);
  EXPECT_EQ(store.num_keys(), 0);
}

TEST(TcpStoreServer, NamesWhoHasThePort) {
  TcpStoreServer first("127.0.0.1", 0, "k");
  try {
    TcpStoreServer second("127.0.0.1", first.port(), "k");
    FAIL() << "port taken twice";
  } catch (const UserError& e) {
    std::string pid = "pid " + std::to_string(::getpid());
    EXPECT_NE(std::string(e.what()).find(pid), std::string::npos) << e.what();
  }
  EXPECT_THROW(TcpStoreServer("192.0.2.1", 0, "k"), UserError);
  EXPECT_THROW(TcpStoreServer("127.0.0.1", 0, ""), UserError);
}

TEST(TcpStore, SaysThatNobodyListens) {
  int port = TcpStoreServer("127.0.0.1", 0, "k").port();
  try {
    TcpStore store("127.0.0.1", port, "k", 100ms);
    FAIL() << "connected to nobody";
  } catch (const CommError& e) {
    EXPECT_NE(std::string(e.what()).find("no server at 127.0.0.1:"), std::string::npos) << e.what();
  }
}

// Without it, a user would not know for the 600 s that joining may take.
TEST(TcpStore, SaysAfterTenSecondsForWhomItWaits) {
  const int port = TcpStoreServer("127.0.0.1", 0, "k").port();
  testing::internal::CaptureStderr();
  EXPECT_THROW(TcpStore("127.0.0.1", port, "k", 11s), CommError);
  const std::string said = testing::internal::GetCapturedStderr();
  const std::string line = "no server at 127.0.0.1:" + std::to_string(port) + " for 10";
  EXPECT_NE(said.find(line), std::string::npos) << said;
  EXPECT_EQ(said.find("no server"), said.rfind("no server")) << said;
}

}  // namespace
}  // namespace tessera
