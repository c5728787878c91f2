// Agents in one process and thread for tests: what their handlers were told, and sockets by hand
// that speak to them. Invariant: whatever is waited for is waited for while the event loop runs, at
// most a minute.
#pragma once
#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <boost/asio/io_context.hpp>
#include <chrono>
#include <map>
#include <string>
#include <vector>

#include "collectives/store/sha256.h"
#include "launcher/agents/peer_frames.h"
#include "launcher/agents/peers.h"

namespace tessera::testing {

using launcher::Address;
using launcher::Link;
using launcher::Peers;
namespace frames = launcher::frames;

inline const std::string kSecret = "a secret of the tests";

/// Runs the event loop until `condition` holds; false if it does not within `limit`.
template <class Condition>
bool run_until(boost::asio::io_context& io, Condition condition,
               std::chrono::milliseconds limit = std::chrono::minutes(1)) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    if (io.stopped()) io.restart();
    io.run_one_for(std::chrono::milliseconds(10));
  }
  return true;
}

/// An agent that keeps what it is told.
struct Agent {
  struct Lost {
    Peers::Loss loss;
    std::string why;
  };
  struct Turned {
    std::string source, what;
    int count;
  };

  explicit Agent(boost::asio::io_context& io, const std::string& secret = kSecret)
      : peers(io, secret,
              {[this](Link link, const Address& address) {
                 EXPECT_TRUE(opened.emplace(link, address).second) << "opened twice";
                 EXPECT_FALSE(lost.contains(link)) << "opened after its end";
                 last = link;
               },
               [this](Link link, std::string_view message) {
                 EXPECT_TRUE(opened.contains(link)) << "received before it was opened";
                 EXPECT_FALSE(lost.contains(link)) << "received after its end";
                 received[link].emplace_back(message);
               },
               [this](Link link, Peers::Loss loss, const std::string& why) {
                 EXPECT_TRUE(lost.emplace(link, Lost{loss, why}).second) << "lost twice";
               },
               [this](const std::string& source, const char* what, int count) {
                 turned_away.push_back({source, what, count});
               }}) {}

  int count_turned_away(const std::string& what) const {
    int n = 0;
    for (const Turned& t : turned_away) n += t.what == what ? t.count : 0;
    return n;
  }

  std::map<Link, Address> opened;
  std::map<Link, std::vector<std::string>> received;
  std::map<Link, Lost> lost;
  std::vector<Turned> turned_away;
  Link last = 0;  // opened
  Peers peers;
};

/// A connection by hand to a port of this machine, or one that was accepted.
class Wire {
 public:
  Wire(boost::asio::io_context& io, int port)
      : io_(&io), fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(uint16_t(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int on = 1;
    ::setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    EXPECT_EQ(::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  }
  struct Accepted {
    int fd;
  };
  Wire(boost::asio::io_context& io, Accepted accepted) : io_(&io), fd_(accepted.fd) {}
  Wire(Wire&& o) : io_(o.io_), fd_(std::exchange(o.fd_, -1)) {}
  ~Wire() {
    if (fd_ >= 0) ::close(fd_);
  }

  int fd() const { return fd_; }
  /// Sends all of it, while the event loop runs.
  void send(std::string_view bytes) {
    EXPECT_TRUE(run_until(*io_, [&] {
      const ssize_t n = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n < 0 && errno != EAGAIN) return true;  // the other side has closed it
      if (n > 0) bytes.remove_prefix(size_t(n));
      return bytes.empty();
    }));
  }
  void end_of_sending() { ::shutdown(fd_, SHUT_WR); }
  /// `n` bytes, or fewer at the end of the stream.
  std::string receive(size_t n) {
    std::string bytes;
    EXPECT_TRUE(run_until(*io_, [&] {
      for (char c[65536]; bytes.size() < n;) {
        const ssize_t got = ::recv(fd_, c, std::min(sizeof c, n - bytes.size()), MSG_DONTWAIT);
        if (got <= 0) return got == 0 || errno != EAGAIN;
        bytes.append(c, size_t(got));
      }
      return true;
    }));
    return bytes;
  }
  bool is_closed() {
    char c;
    const ssize_t got = ::recv(fd_, &c, 1, MSG_DONTWAIT | MSG_PEEK);
    return got == 0 || (got < 0 && errno != EAGAIN);
  }
  bool closes() {
    return run_until(*io_, [&] { return is_closed(); });
  }

 private:
  boost::asio::io_context* io_;
  int fd_;
};

/// A port that listens, by hand.
class Door {
 public:
  explicit Door(int backlog = 16) : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    EXPECT_EQ(::bind(fd_, reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(::listen(fd_, backlog), 0);
    ::getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &size);
    port_ = ntohs(address.sin_port);
  }
  ~Door() { close(); }
  void close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }
  int port() const { return port_; }
  Address address() const { return {"127.0.0.1", port_}; }
  Wire accept(boost::asio::io_context& io) {
    int fd = -1;
    EXPECT_TRUE(run_until(io, [&] {
      fd = ::accept4(fd_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
      return fd >= 0;
    })) << "nobody connects";
    return {io, Wire::Accepted{fd}};
  }
  void do_not_block() { ::fcntl(fd_, F_SETFL, O_NONBLOCK); }

 private:
  int fd_, port_ = 0;
};

/// What a client by hand has after its handshake.
struct ByHand {
  frames::Sealer seal;
  frames::Opener open;
};

/// Proves `secret` to the agent at the other end of `wire`.
inline ByHand prove(Wire& wire, const std::string& secret = kSecret) {
  const std::string nonce = detail::random_bytes(wire::kNonceBytes);
  wire.send(std::string(frames::kMagic) + nonce);
  const std::string answer = wire.receive(frames::kAnswerBytes);
  EXPECT_EQ(answer.size(), frames::kAnswerBytes);
  const std::string server = answer.substr(frames::kMagic.size(), wire::kNonceBytes);
  wire.send(frames::proof(frames::kClient, secret, nonce, server));
  const std::string key = frames::session_key(secret, nonce, server);
  return {frames::Sealer(key, frames::Direction::kToServer),
          frames::Opener(key, frames::Direction::kToClient)};
}

/// A message of `bytes` that differs from others of its size.
inline std::string message_of(size_t bytes, uint64_t seed) {
  std::string text(bytes, '\0');
  for (char& c : text) c = char((seed = seed * 6364136223846793005u + 1442695040888963407u) >> 56);
  return text;
}

}  // namespace tessera::testing
