#include "collectives/gloo/connect.h"

#include <arpa/inet.h>
#include <gloo/common/logging.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/context.h>
#include <gloo/transport/tcp/device.h>
#include <netdb.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <csignal>
#include <cstring>

#include "collectives/store/environment.h"
#include "collectives/thread.h"

namespace tessera::detail {
namespace {

/// Our store as Gloo's.
class Rendezvous final : public gloo::rendezvous::Store {
 public:
  Rendezvous(std::shared_ptr<tessera::Store> store, std::string prefix, Millis timeout)
      : store_(std::move(store)), prefix_(std::move(prefix)), timeout_(timeout) {}

  void set(const std::string& key, const std::vector<char>& data) override {
    store_->set(prefix_ + key, {data.data(), data.size()});
  }
  std::vector<char> get(const std::string& key) override {
    std::string text = store_->get(prefix_ + key, timeout_);
    return {text.begin(), text.end()};
  }
  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override {
    std::vector<std::string> full;
    for (const std::string& k : keys) full.push_back(prefix_ + k);
    store_->wait(full, timeout);
  }

 private:
  std::shared_ptr<tessera::Store> store_;
  std::string prefix_;
  Millis timeout_;
};

// Gloo ends the process where a peer resets a connection that this side is just accepting: it asks
// for the peer's name and throws in a thread of its own, whose pairs (tcp/pair.h) cannot be built
// upon from outside, for Debian installs only half of their headers. So nobody resets what others
// may be accepting: pairs are closed this long after the last connection was begun.
constexpr Millis kAccepting{600};

/// While it lives, looks whether a member has ended. Then no connection should be begun any more,
/// and `give_up` is called from its thread a while later.
class Lookout {
 public:
  Lookout(std::shared_ptr<JoiningStore> store, std::function<void()> give_up)
      : thread_(start_thread("tessera-join", [this, store, give_up] {
          std::unique_lock lock(mutex_);
          auto stopped = [&] { return stop_; };
          while (!changed_.wait_for(lock, JoiningStore::kLook, stopped)) {
            try {
              store->check_members();
            } catch (const std::exception&) {  // who connects asks again, and hears why
              ended_ = true;
              if (!changed_.wait_for(lock, kAccepting, stopped)) give_up();
              return;
            }
          }
        })) {}
  ~Lookout() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  bool ended() const { return ended_; }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;
  std::atomic<bool> ended_ = false;
  std::thread thread_;
};

/// Gloo's connectFullMesh, which would wait for a rank that has ended until its deadline: its end
/// closes all pairs.
class Mesh final : public gloo::rendezvous::Context {
 public:
  using gloo::rendezvous::Context::Context;

  void connect(gloo::rendezvous::Store& store, std::shared_ptr<gloo::transport::Device> device,
               const std::shared_ptr<JoiningStore>& members) {
    std::shared_ptr<gloo::transport::Context> pairs = device->createContext(rank, size);
    pairs->setTimeout(getTimeout());
    std::vector<char> addresses;
    for (int r = 0; r < size; ++r) {
      if (r == rank) continue;
      const std::vector<char> address = pairs->createPair(r)->address().bytes();
      addresses.insert(addresses.end(), address.begin(), address.end());
    }
    store.set(std::to_string(rank), addresses);
    {
      Lookout lookout(members, [this, &pairs] {
        for (int r = 0; r < size; ++r)
          if (r != rank) pairs->getPair(r)->close();
      });
      for (int r = 0; r < size; ++r) {
        if (r == rank) continue;
        if (lookout.ended()) break;
        std::vector<char> theirs = store.get(std::to_string(r));
        peer_ = r;
        pairs->getPair(r)->connect(extractAddress(theirs, r));
      }
    }                          // nobody closes pairs any more
    members->check_members();  // a pair that was closed may count as connected
    device_ = std::move(device);
    transportContext_ = std::move(pairs);
  }
  /// The rank that was connected last, or could not be.
  int peer() const { return peer_; }

 private:
  int peer_ = 0;
};

/// The address of this host on the route to `host`: what a datagram socket binds to when connected,
/// which sends nothing.
std::string address_towards(const std::string& host) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_DGRAM;
  int error = getaddrinfo(host.c_str(), "9", &hints, &found);
  TESSERA_CHECK(error == 0, "MASTER_ADDR={}: does not resolve: {}", host, gai_strerror(error));
  char text[NI_MAXHOST] = {};
  for (addrinfo* a = found; a && !text[0]; a = a->ai_next) {
    int fd = socket(a->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    sockaddr_storage mine{};
    socklen_t size = sizeof mine;
    if (fd >= 0 && connect(fd, a->ai_addr, a->ai_addrlen) == 0 &&
        getsockname(fd, reinterpret_cast<sockaddr*>(&mine), &size) == 0)
      getnameinfo(reinterpret_cast<sockaddr*>(&mine), size, text, sizeof text, nullptr, 0,
                  NI_NUMERICHOST);
    if (fd >= 0) close(fd);
  }
  freeaddrinfo(found);
  TESSERA_CHECK(text[0], "MASTER_ADDR={}: no route to it from this host", host);
  TESSERA_CHECK(std::strncmp(text, "127.", 4) != 0 && std::strcmp(text, "::1") != 0,
                "MASTER_ADDR={}: is a loopback address, but ranks are on several hosts; use the "
                "first host's name or address",
                host);
  return text;
}

// Gloo writes to sockets without MSG_NOSIGNAL: a peer that is gone would end this process by
// SIGPIPE before anybody is told. A program that handles the signal keeps its handler.
void ignore_broken_pipes() {
  struct sigaction now = {};
  ::sigaction(SIGPIPE, nullptr, &now);
  if (now.sa_handler == SIG_DFL) ::signal(SIGPIPE, SIG_IGN);
}

// While it lives the thread, and what it starts, is one that does not interrupt others when it is
// woken. Gloo's thread that moves bytes asks the system for events again and again while another
// one holds the lock of a connection; if it has interrupted that one, on the only CPU of a rank, it
// does so for a whole slice of time.
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

std::shared_ptr<gloo::rendezvous::Context> connect_gloo(const Membership& m,
                                                        const GlooOptions& options) {
  std::string address =
      options.loopback ? "127.0.0.1" : address_towards(job_environment().master_addr);
  ignore_broken_pipes();
  auto context = std::make_shared<Mesh>(m.rank, m.size);
  context->setTimeout(options.join_timeout);
  auto failed = [&](const std::exception& e) {
    options.store->explain();
    const int mine = m.world_ranks[size_t(m.rank)], peer = m.world_ranks[size_t(context->peer())];
    throw CommError(fmt::format("init_process_group: {}: gloo could not connect rank {} at {} with "
                                "rank {}: {}; see the output of rank {}, and restart the job",
                                m.group, mine, address, peer, e.what(), peer),
                    m.group, 0, {peer});
  };
  try {
    gloo::transport::tcp::attr attributes(address.c_str());
    auto device = [&] {
      BatchPolicy inherited;
      return gloo::transport::tcp::CreateDevice(attributes);
    }();
    Rendezvous store(options.store, options.prefix + "gloo/", options.join_timeout);
    context->connect(store, device, options.store);
  } catch (const gloo::Exception& e) {
    failed(e);
  } catch (const gloo::EnforceNotMet& e) {
    failed(e);
  }
  return context;
}

}  // namespace tessera::detail
