#include "collectives/gloo/acceptor.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "collectives/thread.h"

namespace tessera::detail {
namespace {

constexpr Millis kPause{20};
constexpr int kBacklog = 1024;

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

}  // namespace

Acceptor::Acceptor(const std::string& address, std::vector<Caller> callers, Millis token_time)
    : token_time_(token_time), callers_(std::move(callers)), absent_(callers_.size()) {
  listen(address);
  wake_ = Socket(::eventfd(0, EFD_CLOEXEC));
  if (!wake_) fail("eventfd");
  thread_ = start_thread("tessera-accept", [this] { serve(); });
}

Acceptor::~Acceptor() {
  ::eventfd_write(wake_.fd(), 1);
  thread_.join();
}

void Acceptor::listen(const std::string& address) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV | AI_PASSIVE;
  if (::getaddrinfo(address.c_str(), "0", &hints, &found) != 0) {
    errno = EADDRNOTAVAIL;
    fail("address");
  }
  listener_ = Socket(::socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const bool bound = listener_ && ::bind(listener_.fd(), found->ai_addr, found->ai_addrlen) == 0;
  ::freeaddrinfo(found);
  if (!listener_) fail("socket");
  if (!bound) fail("bind");
  if (::listen(listener_.fd(), kBacklog) != 0) fail("listen");
  sockaddr_storage mine{};
  socklen_t size = sizeof mine;
  if (::getsockname(listener_.fd(), reinterpret_cast<sockaddr*>(&mine), &size) != 0)
    fail("getsockname");
  port_ = ntohs(mine.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(mine).sin6_port
                                           : reinterpret_cast<sockaddr_in&>(mine).sin_port);
}

int Acceptor::wait(Millis timeout) {
  std::unique_lock lock(mutex_);
  if (changed_.wait_for(lock, timeout, [&] { return absent_ == 0; })) return -1;
  return int(std::ranges::find_if(callers_, [](const Caller& c) { return !c.socket; }) -
             callers_.begin());
}

void Acceptor::serve() {
  std::vector<pollfd> ready;
  while (absent_ > 0) {
    const auto now = Clock::now();
    std::erase_if(strangers_, [&](const Stranger& s) { return s.until <= now; });
    ready = {{wake_.fd(), POLLIN, 0}, {pause_ > now ? -1 : listener_.fd(), POLLIN, 0}};
    auto next = pause_ > now ? pause_ : Clock::time_point::max();
    if (!strangers_.empty()) next = std::min(next, strangers_.front().until);
    for (const Stranger& s : strangers_) ready.push_back({s.socket.fd(), POLLIN, 0});
    const int wait_ms = next == Clock::time_point::max()
                            ? -1
                            : int(std::chrono::duration_cast<Millis>(next - now).count()) + 1;
    if (::poll(ready.data(), ready.size(), wait_ms) < 0) continue;
    if (ready[0].revents) return;
    auto at = ready.begin() + 2;
    std::erase_if(strangers_, [&](Stranger& s) { return (at++)->revents && !read_token(s); });
    if (ready[1].revents) accept_all();
  }
}

void Acceptor::accept_all() {
  for (;;) {
    Socket socket(::accept4(listener_.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (socket) {
      if (strangers_.size() >= kPlaces) strangers_.pop_front();
      const int on = 1;
      ::setsockopt(socket.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
      strangers_.push_back({std::move(socket), Clock::now() + token_time_});
      continue;
    }
    if (errno == EAGAIN) return;
    if (errno == EINTR || errno == ECONNABORTED) continue;
    // No descriptor is left: close the connection of a stranger to make room, and do not spin on a
    // connection that cannot be accepted.
    if (!strangers_.empty()) strangers_.pop_front();
    pause_ = Clock::now() + kPause;
    return;
  }
}

// Reads from the connection; returns whether it may stay.
bool Acceptor::read_token(Stranger& s) {
  const ssize_t n = ::recv(s.socket.fd(), s.token.data() + s.bytes, s.token.size() - s.bytes, 0);
  if (n < 0) return errno == EAGAIN || errno == EINTR;
  s.bytes += size_t(n);
  if (n == 0) return false;
  if (s.bytes < s.token.size()) return true;
  admit(s);
  return false;
}

void Acceptor::admit(Stranger& s) {
  std::lock_guard lock(mutex_);
  for (Caller& c : callers_) {
    if (!equal_digests(c.token, s.token) || c.socket) continue;
    const ssize_t sent = ::send(s.socket.fd(), c.answer.data(), c.answer.size(), MSG_NOSIGNAL);
    if (sent != ssize_t(c.answer.size())) return;
    c.socket = std::move(s.socket);
    if (--absent_ == 0) changed_.notify_all();
    return;
  }
}

}  // namespace tessera::detail
