#include "launcher/agent.h"

#include <fmt/core.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cerrno>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>

#include "collectives/store/environment.h"
#include "collectives/store/liveness.h"
#include "collectives/store/route.h"
#include "collectives/store/sha256.h"
#include "collectives/store/wire.h"
#include "core/base/error.h"

namespace tessera::launcher {
namespace {

namespace asio = boost::asio;
using Clock = std::chrono::steady_clock;
using Time = Membership::Time;

constexpr Time kConnect{2000};  // for one attempt to reach an agent
constexpr const char* kAgain = "all ranks are started again";
constexpr auto kLeave = std::chrono::milliseconds(1000);

Time now() { return std::chrono::duration_cast<Time>(Clock::now().time_since_epoch()); }

uint64_t random_number() {
  const std::string bytes = detail::random_bytes(8);
  uint64_t n = 0;
  std::memcpy(&n, bytes.data(), sizeof n);
  return n | 1;  // not 0
}

// What agents tell each other within a generation.
enum class Tell : uint8_t {
  kEnd,      // to the leader: a rank has ended
  kFailure,  // to the leader: the first rank of a host that failed on its own
  kSignal,   // to the leader, and from it to all: tlaunch on a host was told to stop
  kDone,     // to the leader: all ranks of a host have ended
  kGrace,    // from the leader: a rank has failed, on whatever host
  kFinish    // from the leader: the job has ended
};

// A descriptor that can be read while a queue has items.
class Bell {
 public:
  Bell() : fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    TESSERA_CHECK(fd_ >= 0, "eventfd: {}", std::strerror(errno));
  }
  ~Bell() { ::close(fd_); }
  Bell(const Bell&) = delete;
  Bell& operator=(const Bell&) = delete;
  int fd() const { return fd_; }
  void ring() { (void)!::write(fd_, &kOne, sizeof kOne); }
  void silence() {
    uint64_t count = 0;
    (void)!::read(fd_, &count, sizeof count);
  }

 private:
  static constexpr uint64_t kOne = 1;
  int fd_;
};

// What the leader knows of a host's attempt.
struct Done {
  int exit_code = 0, stop_signal = 0;
  std::string report;
};

}  // namespace

std::string host_name() {
  char name[256] = {};
  ::gethostname(name, sizeof name - 1);
  const std::string full = name;
  return full.substr(0, full.find('.'));
}

// Its members are of the agent's thread, but for those under the mutex.
struct Agent::Impl : Membership::Outside {
  Impl(const AgentOptions& o, const Secret& secret, TcpStoreServer& store_server);
  ~Impl() override;

  // Of any thread.
  void post(std::function<void()> what) { asio::post(io, std::move(what)); }
  void say(const std::string& text);
  void give(Turn turn);
  void give(News news);

  // Membership::Outside
  Link connect(const std::vector<Address>& addresses) override {
    return peers->connect(addresses, kConnect);
  }
  void send(Link link, std::string message) override { peers->send(link, std::move(message)); }
  void close(Link link) override {
    links.erase(link);
    peers->close(link);
  }
  void begin(const Generation& generation) override;
  void end(const std::string& why) override;
  void on_payload(NodeId from, std::string_view payload) override;
  void give_up(const std::string& why) override { finish(1, "tlaunch: " + why + "\n"); }
  void keep(const std::string&) override {}  // where the number of hosts is fixed, nothing is
  void note(const std::string& text) override { say("tlaunch: " + text); }

  /// The number of the generation in force, or of the last one, from 0.
  int attempt() const { return int(generation.number) - 1; }
  void tell_leader(int of_attempt, const wire::Writer& what);
  void handle(NodeId from, wire::Reader in);
  void on_failure(NodeId from, const RankFailure& failure);
  void on_done(NodeId from, Done done);
  void conclude();
  void finish(int exit_code, const std::string& text);
  void tick();
  void leave();

  const AgentOptions options;
  const std::string secret_name;
  TcpStoreServer& server;
  Node self;
  asio::io_context io{1};
  asio::steady_timer timer{io};
  std::unique_ptr<Peers> peers;
  std::set<Link> links;
  std::unique_ptr<Membership> membership;
  int begun = 0;        // generations
  bool renews = false;  // this agent ends the generation to start the ranks again
  bool finished = false;
  std::unique_ptr<PrefixStore> store;  // of the generation in force, where this agent leads
  Generation generation;
  std::map<NodeId, Done> done;
  std::optional<RankFailure> failure;  // the first one that the leader heard of
  NodeId failed_node = 0;

  std::mutex mutex;
  std::deque<News> news;
  std::deque<Turn> turns;
  Bell news_bell, turn_bell;
  std::thread thread;
};

Agent::Impl::Impl(const AgentOptions& o, const Secret& secret, TcpStoreServer& store_server)
    : options(o),
      secret_name(fmt::format("{} from {}", fingerprint(secret), secret.source)),
      server(store_server) {
  const bool first = options.node_rank == 0;
  peers = std::make_unique<Peers>(
      io, secret.bytes,
      Peers::Handlers{
          .opened =
              [this](Link link, const Address&) {
                links.insert(link);
                membership->opened(link, now());
              },
          .received = [this](Link link,
                             std::string_view m) { membership->received(link, m, now()); },
          .lost =
              [this](Link link, Peers::Loss loss, const std::string& why) {
                links.erase(link);
                if (loss == Peers::Loss::kStranger && !begun && options.node_rank != 0)
                  return finish(
                      1, fmt::format("tlaunch: {} is no agent with this host's secret ({}): {}; "
                                     "give all hosts one secret, by --key-file, TESSERA_JOB_KEY or "
                                     "a copy of ~/.tessera/key\n",
                                     to_string(options.rendezvous), secret_name, why));
                membership->lost(link, why, now());
              },
          .turned_away =
              [this](const std::string& source, const char* what, int count) {
                say(fmt::format("tlaunch: {} connection{} from {} {} turned away: it {}", count,
                                count == 1 ? "" : "s", source, count == 1 ? "was" : "were", what));
              }});
  const int port = peers->listen("", first ? options.rendezvous.port : 0);
  Address reached = options.rendezvous;
  if (!first) {
    const detail::Route route = detail::route_to(options.rendezvous.host);
    TESSERA_CHECK(route.error.empty(), "--rdzv-endpoint {}: {}: {}", to_string(options.rendezvous),
                  options.rendezvous.host, route.error);
    reached = {route.here, port};
  }
  self = {.id = random_number(),
          .start = random_number(),
          .slot = options.node_rank,
          .nproc = options.nproc,
          .host = host_name(),
          .addresses = {reached},
          .store_port = server.port(),
          .job = options.job};
  Membership::Settings settings;
  settings.min_nodes = settings.max_nodes = options.nnodes;
  settings.first = first;
  settings.rendezvous = {options.rendezvous};
  settings.node_timeout = options.node_timeout;
  settings.join_timeout = options.join_timeout;
  membership = std::make_unique<Membership>(settings, self, "", *this, now());
  tick();
  thread = std::thread([this] { io.run(); });
}

Agent::Impl::~Impl() {
  post([this] { leave(); });
  thread.join();
}

// Closes all connections, and stops once all has been sent.
void Agent::Impl::leave() {
  finished = true;
  timer.cancel();
  for (Link link : std::set<Link>(links)) peers->close(link);
  timer.expires_after(kLeave);
  timer.async_wait([this](boost::system::error_code) { io.stop(); });
  const auto look = std::make_shared<std::function<void()>>();
  auto pause = std::make_shared<asio::steady_timer>(io);
  *look = [this, look, pause] {
    if (peers->num_links() == 0) return io.stop();
    pause->expires_after(std::chrono::milliseconds(2));
    pause->async_wait([look](boost::system::error_code e) {
      if (!e) (*look)();
    });
  };
  (*look)();
}

void Agent::Impl::tick() {
  membership->tick(now());
  timer.expires_after(Membership::Settings{}.heartbeat);
  timer.async_wait([this](boost::system::error_code e) {
    if (!e && !finished) tick();
  });
}

void Agent::Impl::say(const std::string& text) {
  give(News{.kind = News::Kind::kNote, .text = text});
}

void Agent::Impl::give(Turn turn) {
  std::lock_guard lock(mutex);
  turns.push_back(std::move(turn));
  turn_bell.ring();
}

void Agent::Impl::give(News item) {
  item.attempt = attempt();
  std::lock_guard lock(mutex);
  news.push_back(std::move(item));
  news_bell.ring();
}

void Agent::Impl::begin(const Generation& g) {
  ++begun;
  generation = g;
  done.clear();
  failure.reset();
  failed_node = 0;
  Turn turn{.generation = g, .place = g.place_of(self.id), .attempt = attempt()};
  turn.leads = g.ballot.by == self.id;
  store.reset();
  if (turn.leads)
    store = std::make_unique<PrefixStore>(attempt_prefix(turn.attempt), server.store());
  give(std::move(turn));
}

void Agent::Impl::end(const std::string& why) {
  if (finished || renews) return;
  give(News{.kind = News::Kind::kEnd, .text = why});
  if (begun <= options.max_restarts) {
    say(why == kAgain
            ? fmt::format("tlaunch: restarting all ranks, restart {} of {}", begun,
                          options.max_restarts)
            : fmt::format(
                  "tlaunch: {}; restarting all ranks when all {} hosts are there, restart {} of "
                  "{}",
                  why, options.nnodes, begun, options.max_restarts));
    return;
  }
  const std::string text = fmt::format("tlaunch: {}\n", why);
  if (membership->leads()) post([this, why] { membership->dismiss(why); });
  finish(1, text);
}

void Agent::Impl::finish(int exit_code, const std::string& text) {
  if (std::exchange(finished, true)) return;
  Turn turn;
  turn.exit_code = exit_code;
  turn.text = text;
  give(std::move(turn));
}

// ---- Within a generation ----

void Agent::Impl::tell_leader(int of_attempt, const wire::Writer& what) {
  if (of_attempt != attempt()) return;
  const std::string payload = what.body();
  if (membership->leads())
    on_payload(self.id, payload);
  else
    membership->tell_leader(payload);
}

void Agent::Impl::on_payload(NodeId from, std::string_view payload) {
  try {
    handle(from, wire::Reader(payload));
  } catch (const wire::BadFrame& e) {
    say(fmt::format("tlaunch: an agent sent what this version does not understand ({})", e.what()));
  }
}

void Agent::Impl::handle(NodeId from, wire::Reader in) {
  const auto what = Tell(in.code());
  const bool leads = membership->leads();
  if (leads != (what == Tell::kEnd || what == Tell::kFailure || what == Tell::kDone) &&
      what != Tell::kSignal)
    return;
  switch (what) {
    case Tell::kEnd: {
      const int rank = int(in.integer());
      const std::string how = in.text();
      if (!store) return;
      try {
        if (in.integer())
          announce_death(*store, rank, how);
        else
          announce_departure(*store, rank);
      } catch (const UserError& e) {  // a store that ranks have filled
        say(fmt::format("tlaunch: rank {} ended, which could not be announced: {}", rank,
                        e.what()));
      }
      return;
    }
    case Tell::kFailure: {
      RankFailure f;
      f.rank = int(in.integer());
      f.how = in.text();
      f.exit_code = int(in.integer());
      return on_failure(from, f);
    }
    case Tell::kSignal: {
      const int signal = int(in.integer());
      if (from != self.id) give(News{.kind = News::Kind::kSignal, .signal = signal});
      if (leads) membership->tell_all(wire::Writer(Tell::kSignal).integer(signal).body());
      return;
    }
    case Tell::kDone: {
      Done d;
      d.exit_code = int(in.integer());
      d.stop_signal = int(in.integer());
      d.report = in.text();
      return on_done(from, std::move(d));
    }
    case Tell::kGrace: {
      News grace{.kind = News::Kind::kFailure};
      const size_t n = in.count();
      in.expect(n, 8);
      for (size_t i = 0; i < n; ++i) grace.absent.push_back(int(in.integer()));
      return give(std::move(grace));
    }
    case Tell::kFinish: {
      const int exit_code = int(in.integer());
      const bool told = NodeId(in.integer()) == self.id;  // by this host's own report
      const std::string text = in.text();
      return finish(exit_code, told ? "" : text);
    }
  }
  throw wire::BadFrame("unknown kind");
}

void Agent::Impl::on_failure(NodeId from, const RankFailure& f) {
  if (failure || !store) return;
  failure = f;
  failed_node = from;
  wire::Writer grace(Tell::kGrace);
  const std::vector<int> absent = cause_of_failure(*store);
  grace.count(absent.size());
  for (int rank : absent) grace.integer(rank);
  membership->tell_all(grace.body());
  give(News{.kind = News::Kind::kFailure, .absent = absent});
}

void Agent::Impl::on_done(NodeId from, Done d) {
  done[from] = std::move(d);
  if (done.size() == generation.nodes.size()) conclude();
}

// All ranks of all hosts have ended: starts them again, or ends the job.
void Agent::Impl::conclude() {
  int exit_code = 0, stop_signal = 0;
  for (const auto& [id, d] : done) {
    if (d.stop_signal) stop_signal = d.stop_signal;
    if (d.exit_code && !exit_code) exit_code = d.exit_code;
  }
  // The host of a rank that others blame, else the one that was the first to say that a rank
  // failed.
  NodeId culprit = failed_node;
  for (int rank : store ? cause_of_failure(*store) : std::vector<int>{})
    for (size_t place = 0; place < generation.nodes.size(); ++place) {
      const int first = generation.first_rank(int(place));
      const Node& node = generation.nodes[place];
      if (rank >= first && rank < first + node.nproc && done[node.id].exit_code) culprit = node.id;
    }
  if (failure) exit_code = failure->exit_code;
  if (culprit && done[culprit].exit_code) exit_code = done[culprit].exit_code;
  std::string elsewhere, summary;
  if (culprit && culprit != self.id) elsewhere = done[culprit].report;
  for (const auto& [id, d] : done)
    if (id != self.id && id != culprit) elsewhere += d.report;
  if (failure) {
    const Node& node = generation.nodes[size_t(generation.place_of(failed_node))];
    summary = fmt::format("tlaunch: the job failed: rank {} on {} was the first to fail: {}\n",
                          failure->rank, node.host, failure->how);
  }
  if (exit_code != 0 && stop_signal == 0 && begun <= options.max_restarts) {
    if (!elsewhere.empty()) say(elsewhere.substr(0, elsewhere.size() - 1));
    say(fmt::format("tlaunch: restarting all ranks, restart {} of {}", begun,
                    options.max_restarts));
    renews = true;
    membership->renew(kAgain, now());
    renews = false;
    return;
  }
  membership->tell_all(wire::Writer(Tell::kFinish)
                           .integer(exit_code)
                           .integer(int64_t(failed_node))
                           .text(summary)
                           .body());
  finish(exit_code, elsewhere);
}

// ---- Of the main thread ----

Agent::Agent(const AgentOptions& options, const Secret& secret, TcpStoreServer& server)
    : impl_(std::make_unique<Impl>(options, secret, server)) {}

Agent::~Agent() = default;

std::optional<Agent::Turn> Agent::await_turn(int stop_fd, Console& console) {
  for (;;) {
    for (News item = take_news(); item.kind != News::Kind::kNone; item = take_news())
      if (item.kind == News::Kind::kNote) console.note(item.text);
    console.flush(0, -1);
    {
      std::lock_guard lock(impl_->mutex);
      impl_->turn_bell.silence();
      if (!impl_->turns.empty()) {
        Turn turn = std::move(impl_->turns.back());  // what came before is over
        impl_->turns.clear();
        attempt_ = turn.attempt;
        if (!impl_->news.empty()) impl_->news_bell.ring();
        return turn;
      }
    }
    pollfd fds[3] = {{impl_->turn_bell.fd(), POLLIN, 0},
                     {impl_->news_bell.fd(), POLLIN, 0},
                     {stop_fd, POLLIN, 0}};
    TESSERA_CHECK(::poll(fds, 3, -1) >= 0 || errno == EINTR, "poll: {}", std::strerror(errno));
    if (fds[2].revents) return std::nullopt;
  }
}

void Agent::tell_done(const Outcome& o) {
  wire::Writer w(Tell::kDone);
  w.integer(o.exit_code).integer(o.stop_signal).text(o.report);
  impl_->post([i = impl_.get(), a = attempt_, w] { i->tell_leader(a, w); });
}

int Agent::news_fd() const { return impl_->news_bell.fd(); }

// News of a later attempt wait until that is the one at hand.
OtherHosts::News Agent::take_news() {
  std::lock_guard lock(impl_->mutex);
  auto& news = impl_->news;
  std::erase_if(news, [&](const News& item) {
    return item.kind != News::Kind::kNote && item.attempt < attempt_;
  });
  const auto next = std::ranges::find_if(news, [&](const News& item) {
    return item.kind == News::Kind::kNote || item.attempt == attempt_;
  });
  if (next == news.end()) {
    impl_->news_bell.silence();
    return {};
  }
  News item = std::move(*next);
  news.erase(next);
  return item;
}

void Agent::tell_end(int rank, const std::string& how, bool failed) {
  wire::Writer w(Tell::kEnd);
  w.integer(rank).text(how).integer(failed);
  impl_->post([i = impl_.get(), a = attempt_, w] { i->tell_leader(a, w); });
}

void Agent::tell_failure(const RankFailure& f) {
  wire::Writer w(Tell::kFailure);
  w.integer(f.rank).text(f.how).integer(f.exit_code);
  impl_->post([i = impl_.get(), a = attempt_, w] { i->tell_leader(a, w); });
}

void Agent::tell_signal(int signal) {
  wire::Writer w(Tell::kSignal);
  w.integer(signal);
  impl_->post([i = impl_.get(), a = attempt_, w] { i->tell_leader(a, w); });
}

}  // namespace tessera::launcher
