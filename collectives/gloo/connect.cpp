#include "collectives/gloo/connect.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gloo/common/logging.h>
#include <gloo/transport/context.h>
#include <gloo/transport/tcp/address.h>
#include <gloo/transport/tcp/device.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "collectives/gloo/mesh.h"

namespace tessera::detail {
namespace {

// Gloo connects two ranks through a listening socket for each pair. That socket accepts the first
// connection, whatever its origin, and the process ends if that connection is reset at once. So
// these sockets listen on a broadcast address, to which no system lets a process connect. Each pair
// is instead connected to a socket of this process, and then the connection that leads to the other
// rank takes the place of that socket, under the same descriptor.
constexpr const char* kUnreachable = "127.255.255.255";

/// A socket that listens on a free port of 127.0.0.1.
Socket listen_here(sockaddr_in& address) {
  address = {};
  address.sin_family = AF_INET, address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  Socket s(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  auto* a = reinterpret_cast<sockaddr*>(&address);
  socklen_t size = sizeof address;
  if (!s || bind(s.fd(), a, size) != 0 || listen(s.fd(), SOMAXCONN) != 0 ||
      getsockname(s.fd(), a, &size) != 0)
    throw std::system_error(errno, std::generic_category());
  return s;
}

/// Finds this process's descriptor of the connection from `here` to `there`; -1: there is none.
int find_descriptor(const sockaddr_storage& here, const sockaddr_in& there) {
  auto same = [](const sockaddr_in& a, const sockaddr_in& b) {
    return a.sin_family == b.sin_family && a.sin_port == b.sin_port &&
           a.sin_addr.s_addr == b.sin_addr.s_addr;
  };
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::stoi(entry.path().filename());
    sockaddr_in self{}, peer{};
    socklen_t self_size = sizeof self, peer_size = sizeof peer;
    if (getsockname(fd, reinterpret_cast<sockaddr*>(&self), &self_size) == 0 &&
        getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_size) == 0 &&
        same(self, reinterpret_cast<const sockaddr_in&>(here)) && same(peer, there))
      return fd;
  }
  return -1;
}

/// While this object lives, the device's event loop never waits. Removing a descriptor from the
/// loop waits for the end of an iteration, which takes 10 ms when nothing happens.
class TurningLoop final : public gloo::transport::tcp::Handler {
 public:
  explicit TurningLoop(gloo::transport::tcp::Device& device)
      : device_(device), always_(::eventfd(1, EFD_CLOEXEC)) {
    if (!always_) throw std::system_error(errno, std::generic_category(), "eventfd");
    device_.registerDescriptor(always_.fd(), EPOLLIN, this);
  }
  ~TurningLoop() override { device_.unregisterDescriptor(always_.fd(), this); }
  void handleEvents(int) override {}

 private:
  gloo::transport::tcp::Device& device_;
  const Socket always_;
};

/// Makes `pair` use `socket`; returns the descriptor of the connection.
int adopt(gloo::transport::Pair& pair, gloo::transport::tcp::Device& device, Socket socket) {
  using gloo::transport::tcp::Address;
  sockaddr_in address;
  const Socket listener = listen_here(address);
  pair.connect(Address(reinterpret_cast<sockaddr*>(&address), sizeof address).bytes());
  const int fd = find_descriptor(Address(pair.address().bytes()).getSockaddr(), address);
  TESSERA_ASSERT(fd >= 0, "gloo: the connection of a pair was not found");
  auto& handler = dynamic_cast<gloo::transport::tcp::Handler&>(pair);
  device.unregisterDescriptor(fd, &handler);
  if (dup3(socket.fd(), fd, O_CLOEXEC) < 0) throw std::system_error(errno, std::generic_category());
  device.registerDescriptor(fd, EPOLLIN, &handler);
  return fd;
}

/// A Gloo context that uses given connections.
class Connected final : public gloo::rendezvous::Context {
 public:
  using gloo::rendezvous::Context::Context;
  /// Returns the descriptors of the connections, by rank.
  std::vector<int> take(std::shared_ptr<gloo::transport::tcp::Device> device,
                        std::vector<Socket> sockets) {
    std::shared_ptr<gloo::transport::Context> pairs = device->createContext(rank, size);
    pairs->setTimeout(getTimeout());
    TurningLoop turning(*device);
    std::vector<int> descriptors(size_t(size), -1);
    for (int r = 0; r < size; ++r)
      if (r != rank)
        descriptors[size_t(r)] =
            adopt(*pairs->createPair(r), *device, std::move(sockets[size_t(r)]));
    device_ = std::move(device);
    transportContext_ = std::move(pairs);
    return descriptors;
  }
};

// Gloo writes to sockets without MSG_NOSIGNAL, so a write to a peer that is gone would end this
// process by SIGPIPE before the failure is reported. A program that handles the signal keeps its
// handler.
void ignore_broken_pipes() {
  struct sigaction now = {};
  ::sigaction(SIGPIPE, nullptr, &now);
  if (now.sa_handler == SIG_DFL) ::signal(SIGPIPE, SIG_IGN);
}

// While this object lives, its thread and threads it starts are scheduled such that they do not
// preempt others when they wake up. Gloo's I/O thread polls the system for events while another
// thread holds the lock of a connection; if it preempted that thread on the rank's only CPU, it
// would poll for a whole time slice.
class BatchPolicy {
 public:
  BatchPolicy() : policy_(sched_getscheduler(0)) { set(SCHED_BATCH); }
  ~BatchPolicy() { set(policy_); }

 private:
  void set(int policy) {
    const sched_param none{};
    if (policy_ == SCHED_OTHER) sched_setscheduler(0, policy, &none);
  }
  const int policy_;
};

}  // namespace

GlooConnections connect_gloo(const Membership& m, const GlooOptions& options) {
  const std::string& address = options.address;
  ignore_broken_pipes();
  const int mine = m.world_ranks[size_t(m.rank)];
  auto failed = [&](const std::exception& e) {
    options.store->explain();
    throw CommError(
        fmt::format("init_process_group: {}: gloo could not open a connection of rank {} "
                    "at {}: {}; see what is wrong with its host, and restart the job",
                    m.group, mine, address, e.what()),
        m.group, 0, {m.rank});
  };
  auto context = std::make_shared<Connected>(m.rank, m.size);
  context->setTimeout(options.join_timeout);
  std::vector<int> descriptors;
  try {
    std::vector<Socket> sockets =
        connect_ranks(m, *options.store, options.prefix + "gloo/", address, options.join_timeout);
    gloo::transport::tcp::attr attributes(kUnreachable);
    auto device = [&] {
      BatchPolicy inherited;
      return gloo::transport::tcp::CreateDevice(attributes);
    }();
    descriptors = context->take(std::dynamic_pointer_cast<gloo::transport::tcp::Device>(device),
                                std::move(sockets));
  } catch (const PeerError& e) {
    options.store->explain();
    const int peer = m.world_ranks[size_t(e.peer)];
    throw CommError(fmt::format("init_process_group: {}: gloo could not connect rank {} at {} with "
                                "rank {}: {}; see the output of rank {}, and restart the job",
                                m.group, mine, address, peer, e.what(), peer),
                    m.group, 0, {e.peer});
  } catch (const std::system_error& e) {
    failed(e);
  } catch (const gloo::Exception& e) {
    failed(e);
  } catch (const gloo::EnforceNotMet& e) {
    failed(e);
  }
  options.store->check_members();  // a member that has ended since may have accepted the connection
  return {std::move(context), std::move(descriptors)};
}

}  // namespace tessera::detail
