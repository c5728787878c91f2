#include "collectives/gloo/mesh.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <sstream>
#include <system_error>

#include "collectives/store/environment.h"

namespace tessera::detail {
namespace {

/// Where a rank accepts connections, as written to the store.
struct Endpoint {
  std::string address;
  int port = 0;
  std::string nonce;  // makes tokens valid for one group only
  std::string text() const { return fmt::format("{} {} {}", address, port, nonce); }
};
Endpoint parse_endpoint(const std::string& text) {
  Endpoint e;
  std::istringstream fields(text);
  fields >> e.address >> e.port >> e.nonce;
  TESSERA_CHECK(!fields.fail(),
                "init_process_group: a rank's address is \"{}\"; is the store used by two jobs?",
                text.substr(0, 100));
  return e;
}

/// The token that `from` sends to `to`, which listens, and the answer it gets.
Caller caller(const std::string& key, const std::string& nonce, int from, int to) {
  auto digest = [&](const char* role) {
    return hmac_sha256(key, fmt::format("tessera gloo {} {} {} {}", role, nonce, from, to));
  };
  return {digest("token"), digest("answer")};
}

class Mesh {
 public:
  Mesh(const Membership& m, RendezvousStore& store, const std::string& prefix, Millis timeout)
      : m_(m),
        store_(store),
        prefix_(prefix),
        deadline_(std::chrono::steady_clock::now() + timeout),
        wait_(m, timeout, {}, store.watchdog()) {}

  std::vector<Socket> connect(const std::string& address);

 private:
  std::string key_of(int rank) const { return fmt::format("{}{}", prefix_, rank); }
  Socket connect_to(int rank);
  Socket try_to(int rank, const Endpoint& endpoint, const Caller& us);
  void await(const Socket& socket, short events, int rank);
  void look(int rank);

  const Membership& m_;
  RendezvousStore& store_;
  const std::string prefix_;
  const std::chrono::steady_clock::time_point deadline_;
  RendezvousWait wait_;
  const std::string job_key_ = job_environment().key;
};

std::vector<Socket> Mesh::connect(const std::string& address) {
  const std::string nonce = to_hex(random_bytes(32));
  std::vector<Caller> above;
  for (int r = m_.rank + 1; r < m_.size; ++r) above.push_back(caller(job_key_, nonce, r, m_.rank));
  std::optional<Acceptor> acceptor;
  if (!above.empty()) {
    acceptor.emplace(address, std::move(above));
    store_.set(key_of(m_.rank), Endpoint{address, acceptor->port(), nonce}.text());
  }
  std::vector<Socket> sockets(size_t(m_.size));
  for (int r = 0; r < m_.rank; ++r) sockets[size_t(r)] = connect_to(r);
  if (!acceptor) return sockets;
  for (int absent; (absent = acceptor->wait(RendezvousStore::kCheckInterval)) >= 0;)
    look(m_.rank + 1 + absent);
  int r = m_.rank;
  for (Caller& c : acceptor->take()) sockets[size_t(++r)] = std::move(c.socket);
  return sockets;
}

Socket Mesh::connect_to(int rank) {
  wait_.check({rank});
  const auto left =
      std::chrono::duration_cast<Millis>(deadline_ - std::chrono::steady_clock::now());
  const Endpoint endpoint = parse_endpoint(store_.get(key_of(rank), std::max(left, Millis(1))));
  for (Millis pause{5};; pause = std::min(2 * pause, RendezvousStore::kCheckInterval)) {
    if (Socket s = try_to(rank, endpoint, caller(job_key_, endpoint.nonce, m_.rank, rank)))
      return s;
    std::this_thread::sleep_for(pause);
    look(rank);
  }
}

// Returns no socket if the connection ended before it was answered: it may have been closed to make
// room for others.
Socket Mesh::try_to(int rank, const Endpoint& endpoint, const Caller& us) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  const std::string port = std::to_string(endpoint.port);
  if (getaddrinfo(endpoint.address.c_str(), port.c_str(), &hints, &found) != 0)
    throw PeerError(rank, EADDRNOTAVAIL);
  Socket s(::socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  int error = errno;
  if (s) error = ::connect(s.fd(), found->ai_addr, found->ai_addrlen) == 0 ? 0 : errno;
  freeaddrinfo(found);
  if (!s) throw std::system_error(error, std::generic_category(), "socket");
  if (error == EINPROGRESS) {
    await(s, POLLOUT, rank);
    socklen_t size = sizeof error;
    getsockopt(s.fd(), SOL_SOCKET, SO_ERROR, &error, &size);
  }
  if (error == ECONNRESET) return {};
  if (error != 0) throw PeerError(rank, error);
  const int on = 1;
  setsockopt(s.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  if (send(s.fd(), us.token.data(), us.token.size(), MSG_NOSIGNAL) != ssize_t(us.token.size()))
    return {};
  Digest answer{};
  for (size_t bytes = 0; bytes < answer.size();) {
    await(s, POLLIN, rank);
    const ssize_t n = recv(s.fd(), answer.data() + bytes, answer.size() - bytes, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (n <= 0) return {};
    bytes += size_t(n);
  }
  return equal_digests(answer, us.answer) ? std::move(s) : Socket();
}

void Mesh::await(const Socket& socket, short events, int rank) {
  pollfd ready{socket.fd(), events, 0};
  while (poll(&ready, 1, int(RendezvousStore::kCheckInterval.count())) <= 0) look(rank);
}

// Called while this rank waits for `rank`.
void Mesh::look(int rank) {
  store_.check_members();
  wait_.check({rank});
}

}  // namespace

std::vector<Socket> connect_ranks(const Membership& members, RendezvousStore& store,
                                  const std::string& prefix, const std::string& address,
                                  Millis timeout) {
  return Mesh(members, store, prefix, timeout).connect(address);
}

}  // namespace tessera::detail
