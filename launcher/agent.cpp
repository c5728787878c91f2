#ifdef __SANITIZE_THREAD__  // Asio fences what its mutexes order anyway; the sanitizer sees those
#pragma GCC diagnostic ignored "-Wtsan"
#endif

#include "launcher/agent.h"

#include <fmt/core.h>
#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cerrno>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "collectives/store/environment.h"
#include "collectives/store/liveness.h"
#include "collectives/store/route.h"
#include "collectives/store/sha256.h"
#include "collectives/store/tcp_server.h"
#include "collectives/store/wire.h"
#include "core/base/error.h"
#include "launcher/agents/peers.h"
#include "launcher/bell.h"
#include "launcher/console.h"
#include "launcher/supervisor.h"

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
  kLeft,     // from the leader: the first rank has ended well
  kFinish    // from the leader: the job has ended
};

// What the leader knows of a host's attempt.
struct Done {
  int exit_code = 0, stop_signal = 0;
  bool final = false;  // the attempt must not be made again
  std::string report;
};

// Each agent's store has a key of its own, which all agents can compute.
std::string store_key(const Secret& secret, NodeId id) {
  const detail::Digest key =
      detail::hmac_sha256(secret.bytes, fmt::format("store of agent {:016x}", id));
  return detail::to_hex(std::string(key.begin(), key.end()));
}

// A store that the other hosts can reach.
std::unique_ptr<TcpStoreServer> serve_all(const std::string& key) {
  try {
    return std::make_unique<TcpStoreServer>("::", 0, key);
  } catch (const UserError&) {  // this machine has no IPv6
    return std::make_unique<TcpStoreServer>("0.0.0.0", 0, key);
  }
}

// Reads one of the signals that end tlaunch; 0: another one, which is of no concern without ranks.
int read_stop_signal(int fd) {
  signalfd_siginfo info{};
  if (::read(fd, &info, sizeof info) != ssize_t(sizeof info)) return 0;
  const int signal = int(info.ssi_signo);
  const bool stops = signal == SIGINT || signal == SIGTERM || signal == SIGHUP || signal == SIGQUIT;
  return stops ? signal : 0;
}

}  // namespace

std::string host_name() {
  char name[256] = {};
  ::gethostname(name, sizeof name - 1);
  const std::string full = name;
  return full.substr(0, full.find('.'));
}

// All members but those under the mutex belong to the agent's thread.
struct Agent::Impl : Membership::Outside {
  Impl(const AgentOptions& o, const Secret& shared);
  ~Impl() override;

  /// Any thread may call it.
  void post(std::function<void()> what) { asio::post(io, std::move(what)); }
  /// Tells the leader, after what was told before; any thread may call it.
  void tell_later(int of_attempt, const wire::Writer& what) {
    post([this, of_attempt, what] { tell_leader(of_attempt, what); });
  }
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

  /// That of the generation in force, or of the last one.
  int attempt() const { return generation.restarts; }
  void tell_leader(int of_attempt, const wire::Writer& what);
  void handle(NodeId from, wire::Reader in);
  void on_failure(NodeId from, const RankFailure& failure);
  void on_done(NodeId from, Done done);
  void conclude();
  void finish(int exit_code, const std::string& text);
  void tick();
  void run();
  void leave();
  void await_sent();

  const AgentOptions options;
  const Secret secret;
  Node self;
  std::unique_ptr<TcpStoreServer> server;
  asio::io_context io{1};
  asio::steady_timer timer{io};
  std::unique_ptr<Peers> peers;
  std::set<Link> links;
  std::unique_ptr<Membership> membership;
  bool has_begun = false;  // a generation
  bool renews = false;     // this agent ends the generation to start the ranks again
  bool finished = false;
  Clock::time_point leaves_until;
  std::shared_ptr<Store> store;  // of the generation in force, where this agent leads
  Generation generation;
  std::map<NodeId, Done> done;
  std::optional<RankFailure> failure;  // the first one that the leader heard of
  NodeId failed_node = 0;
  int stop_signal = 0;    // that a host was told
  bool has_left = false;  // some rank has ended well

  std::atomic<bool> in_force{false};  // a generation is

  std::mutex mutex;
  std::deque<News> news;
  std::deque<Turn> turns;
  Bell news_bell, turn_bell;
  std::thread thread;
};

Agent::Impl::Impl(const AgentOptions& o, const Secret& shared) : options(o), secret(shared) {
  self.id = random_number();
  server = serve_all(store_key(secret, self.id));
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
                if (loss == Peers::Loss::kStranger && !has_begun && options.node_rank != 0)
                  return finish(
                      1, fmt::format("tlaunch: {} is no agent with this host's secret ({} from "
                                     "{}): {}; give all hosts one secret, by --key-file, "
                                     "TESSERA_JOB_KEY or a copy of ~/.tessera/key\n",
                                     to_string(options.rendezvous), fingerprint(secret),
                                     secret.source, why));
                membership->lost(link, why, now());
              },
          .turned_away =
              [this](const std::string& source, const char* what, int count) {
                say(fmt::format("tlaunch: {} connection{} from {} {} turned away: it {}", count,
                                count == 1 ? "" : "s", source, count == 1 ? "was" : "were", what));
              }});
  const int port = peers->listen("", first ? options.rendezvous.port : 0);
  Address reached = options.rendezvous;
  const detail::Route route = detail::route_to(options.rendezvous.host);
  TESSERA_CHECK(route.error.empty(), "--rdzv-endpoint {}: {}: {}", to_string(options.rendezvous),
                options.rendezvous.host, route.error);
  if (!first) reached = {route.here, port};
  self = {.id = self.id,
          .slot = options.node_rank,
          .nproc = options.nproc,
          .host = host_name(),
          .addresses = {reached},
          .store_port = server->port(),
          .job = options.job};
  Membership::Settings settings;
  settings.min_nodes = settings.max_nodes = options.nnodes;
  settings.first = first;
  settings.rendezvous = {options.rendezvous};
  settings.run = options.run;
  settings.node_timeout = options.node_timeout;
  settings.join_timeout = options.join_timeout;
  membership = std::make_unique<Membership>(settings, self, "", *this, now());
  tick();
  thread = std::thread([this] { run(); });
}

void Agent::Impl::run() {
  for (;;) try {
      io.run();
      return;
    } catch (const std::exception& e) {
      give(News{.kind = News::Kind::kEnd, .text = e.what()});
      finish(1, fmt::format("tlaunch: the agent of this host failed: {}\n", e.what()));
    }
}

Agent::Impl::~Impl() {
  post([this] { leave(); });
  thread.join();
}

// Closes all connections, and stops once all has been sent.
void Agent::Impl::leave() {
  finished = true;
  for (Link link : std::set<Link>(links)) peers->close(link);
  leaves_until = Clock::now() + kLeave;
  await_sent();
}

void Agent::Impl::await_sent() {
  if (peers->num_closing() == 0 || Clock::now() > leaves_until) return io.stop();
  timer.expires_after(std::chrono::milliseconds(2));
  timer.async_wait([this](boost::system::error_code e) {
    if (!e) await_sent();
  });
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
  has_begun = in_force = true;
  generation = g;
  failure.reset();
  failed_node = 0, stop_signal = 0, has_left = false;
  Turn turn;
  turn.generation = g;
  turn.place = g.place_of(self.id);
  turn.key = store_key(secret, g.ballot.by);
  store.reset();
  if (g.ballot.by == self.id) {
    server->forget(attempt_prefix(g.restarts - 1));
    store = std::make_shared<PrefixStore>(attempt_prefix(g.restarts), server->store());
  }
  turn.store = store;
  give(std::move(turn));
}

void Agent::Impl::end(const std::string& why) {
  done.clear();
  store.reset();
  in_force = false;
  if (finished || renews) return;
  give(News{.kind = News::Kind::kEnd, .text = why});
  const int next = generation.restarts + 1;
  if (next <= options.max_restarts) {
    say(why == kAgain
            ? fmt::format("tlaunch: restarting all ranks, restart {} of {}", next,
                          options.max_restarts)
            : fmt::format(
                  "tlaunch: {}; restarting all ranks when all {} hosts are there, restart {} of "
                  "{}",
                  why, options.nnodes, next, options.max_restarts));
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
  if (of_attempt != attempt() || !membership->current()) return;
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
        if (in.integer()) {
          announce_death(*store, rank, how);
        } else {
          announce_departure(*store, rank);
          if (std::exchange(has_left, true)) return;
          membership->tell_all(wire::Writer(Tell::kLeft).body());
          give(News{.kind = News::Kind::kLeft});
        }
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
      stop_signal = signal;
      if (from != self.id) give(News{.kind = News::Kind::kSignal, .signal = signal});
      if (leads) membership->tell_all(wire::Writer(Tell::kSignal).integer(signal).body());
      return;
    }
    case Tell::kDone: {
      Done d;
      d.exit_code = int(in.integer());
      d.stop_signal = int(in.integer());
      d.final = in.integer();
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
    case Tell::kLeft: return give(News{.kind = News::Kind::kLeft});
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
  int exit_code = 0;
  bool again = generation.restarts < options.max_restarts && !stop_signal;
  for (const auto& [id, d] : done) {
    if (d.exit_code && !exit_code) exit_code = d.exit_code;
    again = again && !d.stop_signal && !d.final;
  }
  // The host of a rank that others blame, else the one that was the first to say that a rank
  // failed.
  NodeId culprit = failed_node;
  std::string first_failure;
  if (failure) {
    exit_code = failure->exit_code;
    first_failure =
        fmt::format("rank {} on {} was the first to fail: {}", failure->rank,
                    generation.nodes[size_t(generation.place_of(culprit))].host, failure->how);
  }
  for (int rank : store ? cause_of_failure(*store) : std::vector<int>{})
    for (size_t place = 0; place < generation.nodes.size(); ++place) {
      const int first = generation.first_rank(int(place));
      const Node& node = generation.nodes[place];
      if (rank < first || rank >= first + node.nproc || !done[node.id].exit_code) continue;
      culprit = node.id;
      exit_code = done[culprit].exit_code;
      if (!failure || failure->rank != rank)
        first_failure = fmt::format("the other ranks gave up rank {} on {}", rank, node.host);
    }
  std::string elsewhere;
  if (culprit && culprit != self.id) elsewhere = done[culprit].report;
  for (const auto& [id, d] : done)
    if (id != self.id && id != culprit) elsewhere += d.report;
  if (exit_code != 0 && again) {
    if (!elsewhere.empty()) say(elsewhere.substr(0, elsewhere.size() - 1));
    say(fmt::format("tlaunch: restarting all ranks, restart {} of {}", generation.restarts + 1,
                    options.max_restarts));
    renews = true;
    membership->renew(kAgain, now());
    renews = false;
    return;
  }
  if (!exit_code && stop_signal) exit_code = 128 + stop_signal;
  membership->tell_all(
      wire::Writer(Tell::kFinish)
          .integer(exit_code)
          .integer(int64_t(culprit))
          .text(first_failure.empty() ? "" : "tlaunch: the job failed: " + first_failure + "\n")
          .body());
  finish(exit_code, elsewhere);
}

// ---- What the main thread calls ----

Agent::Agent(const AgentOptions& options, const Secret& secret)
    : impl_(std::make_unique<Impl>(options, secret)) {}

Agent::~Agent() = default;

Agent::Turn Agent::await_turn(int signal_fd, Console& console) {
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
        attempt_ = turn.generation ? turn.generation->restarts : attempt_;
        stopped_ = false;
        if (!impl_->news.empty()) impl_->news_bell.ring();
        return turn;
      }
    }
    pollfd fds[3] = {{impl_->turn_bell.fd(), POLLIN, 0},
                     {impl_->news_bell.fd(), POLLIN, 0},
                     {signal_fd, POLLIN, 0}};
    // A console that is behind is asked again soon.
    const bool behind = console.pending(0) + console.pending(1) > 0;
    TESSERA_CHECK(::poll(fds, 3, behind ? 20 : -1) >= 0 || errno == EINTR, "poll: {}",
                  std::strerror(errno));
    if (!fds[2].revents) continue;
    const int signal = read_stop_signal(signal_fd);
    if (!signal) continue;
    const bool ranks_run = impl_->in_force.load();
    console.note(fmt::format("tlaunch: signal {} ({}) {}", signal, ::strsignal(signal),
                             ranks_run && !stopped_
                                 ? "passed on to the ranks of other hosts; send it again to leave"
                                 : "while waiting for the other hosts"));
    if (!ranks_run || std::exchange(stopped_, true)) {
      Turn turn;
      turn.exit_code = 128 + signal;
      return turn;
    }
    tell_signal(signal);
  }
}

void Agent::tell_done(const Outcome& o, bool final) {
  if (o.cut_short) return;
  wire::Writer w(Tell::kDone);
  w.integer(o.exit_code).integer(o.stop_signal).integer(final).text(o.report);
  impl_->tell_later(attempt_, w);
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
  impl_->tell_later(attempt_, w);
}

void Agent::tell_failure(const RankFailure& f) {
  wire::Writer w(Tell::kFailure);
  w.integer(f.rank).text(f.how).integer(f.exit_code);
  impl_->tell_later(attempt_, w);
}

void Agent::tell_signal(int signal) {
  wire::Writer w(Tell::kSignal);
  w.integer(signal);
  impl_->tell_later(attempt_, w);
}

}  // namespace tessera::launcher
