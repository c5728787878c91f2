// Accepts the connections of a group for one rank. The rank listens on one socket, and a thread
// admits only connections that begin with the right 32 bytes, the token. Invariant: a connection
// that has not shown its token yet occupies one of a fixed number of places for a few seconds, and
// what it sends reaches nothing but a buffer of 32 bytes.
#pragma once
#include <unistd.h>

#include <condition_variable>
#include <list>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "collectives/store/sha256.h"
#include "collectives/store/store.h"

namespace tessera::detail {

/// A file descriptor, closed with its owner.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket() {
    if (fd_ >= 0) ::close(fd_);
  }
  int fd() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

/// An expected connection: the token it must begin with, and the answer it gets.
struct Caller {
  Digest token, answer;
  Socket socket{};  // valid once it was accepted; it does not block
};

class Acceptor {
 public:
  /// The time that a connection has to show its token, and the number of connections that may be
  /// without: the oldest is closed to make room for the next.
  static constexpr Millis kTokenTime{5000};
  static constexpr size_t kPlaces = 256;

  /// Listens on a free port of the numeric `address`. Throws std::system_error.
  Acceptor(const std::string& address, std::vector<Caller> callers, Millis token_time = kTokenTime);
  ~Acceptor();

  int port() const { return port_; }
  /// Waits at most `timeout` for all callers; returns the index of the first that is absent, or -1.
  int wait(Millis timeout);
  /// Returns all callers once they were accepted.
  std::vector<Caller> take() {
    std::lock_guard lock(mutex_);  // others may still show their tokens
    return std::move(callers_);
  }

 private:
  using Clock = std::chrono::steady_clock;
  struct Stranger {
    Socket socket;
    Clock::time_point until;
    Digest token{};
    size_t bytes = 0;  // bytes of `token` received so far
  };

  void listen(const std::string& address);
  void serve();
  void accept_all();
  bool read_token(Stranger& stranger);
  void admit(Stranger& stranger);

  const Millis token_time_;
  Socket listener_, wake_;
  int port_ = 0;
  std::list<Stranger> strangers_;  // oldest first; only the thread uses it
  Clock::time_point pause_{};      // nothing is accepted before; only the thread uses it
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Caller> callers_;
  size_t absent_;
  std::thread thread_;
};

}  // namespace tessera::detail
