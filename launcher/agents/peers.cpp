#ifdef __SANITIZE_THREAD__  // Asio fences what its mutexes order anyway; the sanitizer sees those
#pragma GCC diagnostic ignored "-Wtsan"
#endif

#include "launcher/agents/peers.h"

#include <algorithm>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <map>

#include "collectives/store/listener.h"
#include "collectives/store/store.h"
#include "core/base/error.h"
#include "launcher/agents/peer_connection.h"

namespace tessera::launcher {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;
using Clock = std::chrono::steady_clock;

constexpr auto kTallyTime = std::chrono::seconds(10);
constexpr size_t kMaxSources = 64;  // that are told apart in that time

// IPv4 addresses that come to a socket of IPv6 as those of IPv4.
asio::ip::address plain(const asio::ip::address& address) {
  if (!address.is_v6() || !address.to_v6().is_v4_mapped()) return address;
  return asio::ip::make_address_v4(asio::ip::v4_mapped, address.to_v6());
}

Address address_of(const tcp::endpoint& endpoint) {
  return {plain(endpoint.address()).to_string(), endpoint.port()};
}

}  // namespace

std::string to_string(const Address& address) {
  const bool is_v6 = address.host.find(':') != std::string::npos;
  return is_v6 ? fmt::format("[{}]:{}", address.host, address.port)
               : fmt::format("{}:{}", address.host, address.port);
}

struct Peers::Impl : std::enable_shared_from_this<Peers::Impl> {
  using ConnectionRef = std::shared_ptr<PeerConnection>;

  /// A connection that is being made, to whichever address proves itself first.
  struct Dial {
    struct Try {
      std::string name;
      ConnectionRef connection;  // null while the name is resolved
    };
    struct Failure {
      std::string name;
      Loss loss;
      std::string why;
    };

    explicit Dial(asio::io_context& io) : resolver(io), timer(io) {}
    tcp::resolver resolver;
    asio::steady_timer timer;
    std::map<int, Try> tries;  // that have not failed
    int last_id = 0;
    std::vector<Failure> failures;
    std::vector<std::string> messages;  // to be sent when it is made
    size_t message_bytes = 0;

    void stop() {
      resolver.cancel();
      timer.cancel();
      for (auto& [id, one] : tries)
        if (one.connection) one.connection->close();
      tries.clear();
    }
  };
  using DialRef = std::shared_ptr<Dial>;

  /// Peers that were turned away for one reason.
  struct Tally {
    const char* what;
    Clock::time_point until;
    int count = 0;  // since the last report
  };

  Impl(asio::io_context& io, std::string secret, Handlers handlers)
      : io(io), secret(std::move(secret)), handlers(std::move(handlers)), tally_timer(io) {}

  /// A function for Asio and for connections to call, which does nothing once Peers has gone.
  template <class F>
  auto while_here(F function) {
    return [weak = weak_from_this(), function](auto&&... arguments) {
      auto self = weak.lock();
      if (self && !self->ended) function(*self, arguments...);
    };
  }

  void accepted(tcp::socket socket);
  void make_room();
  void turn_away(const asio::ip::address& address, const char* what);
  void report_tallies();

  void dial(Link link, const Address& address);
  void try_endpoint(Link link, const tcp::endpoint& endpoint, const std::string& name);
  void on_resolved(Link link, int id, const error_code& e,
                   const tcp::resolver::results_type& found);
  void on_won(Link link, int id);
  void fail_try(Link link, int id, Loss loss, const std::string& why);
  void fail_dial(Link link);

  std::function<void(std::string_view)> receiver(Link link);
  void admit(Link link, const ConnectionRef& connection, std::vector<std::string> messages);
  void on_lost(Link link, const PeerConnection::End& why);
  void end();

  asio::io_context& io;
  const std::string secret;
  const Handlers handlers;
  std::shared_ptr<detail::Listener> listener;
  Link last_link = 0;
  std::map<Link, ConnectionRef> unproven;  // that have connected to us, oldest first
  std::map<Link, ConnectionRef> open;
  std::map<Link, DialRef> dials;
  std::vector<std::weak_ptr<PeerConnection>> finishing;
  std::map<std::pair<std::string, std::string>, Tally> tallies;  // by source and what
  asio::steady_timer tally_timer;
  bool is_tallying = false;
  bool ended = false;
};

// Peers that connect to us.

void Peers::Impl::accepted(tcp::socket socket) {
  error_code e;
  const tcp::endpoint from = socket.remote_endpoint(e);
  if (e) return;  // it has gone again
  if (unproven.size() >= detail::kMaxUnproven) make_room();
  if (ended) return;  // by the handler that make_room() has called
  const Link link = ++last_link;
  auto connection = std::make_shared<PeerConnection>(
      io, secret,
      PeerConnection::Events{
          while_here([link](Impl& impl) {
            const auto proven = impl.unproven.extract(link);
            impl.admit(link, proven.mapped(), {});
          }),
          receiver(link), while_here([link](Impl& impl, const PeerConnection::End& why) {
            const auto refused = impl.unproven.extract(link);
            if (refused.empty()) return impl.on_lost(link, why);
            if (*why.offence) impl.turn_away(refused.mapped()->endpoint().address(), why.offence);
          })});
  unproven.emplace(link, connection);
  connection->serve(std::move(socket), from);
}

void Peers::Impl::make_room() {
  if (unproven.empty()) return;
  const ConnectionRef oldest = unproven.extract(unproven.begin()).mapped();
  oldest->close();
  turn_away(oldest->endpoint().address(), "was closed to make room for others");
}

void Peers::Impl::turn_away(const asio::ip::address& address, const char* what) {
  std::string source = plain(address).to_string();
  if (tallies.size() >= kMaxSources && !tallies.contains({source, what}))
    source = "other addresses";
  const auto [found, is_first] =
      tallies.try_emplace({source, what}, Tally{what, Clock::now() + kTallyTime});
  if (!is_first) {
    ++found->second.count;
    return;
  }
  if (!is_tallying) report_tallies();
  handlers.turned_away(source, what, 1);
}

// Reports tallies whose time is over, forgets those that have nothing new, and comes again while
// there are any.
void Peers::Impl::report_tallies() {
  struct Report {
    std::string source;
    const char* what;
    int count;
  };
  std::vector<Report> reports;
  const auto now = Clock::now();
  auto next = now + kTallyTime;
  for (auto it = tallies.begin(); it != tallies.end();) {
    auto& [key, tally] = *it;
    const bool is_over = tally.until <= now;
    if (is_over && tally.count > 0) {
      reports.push_back({key.first, tally.what, std::exchange(tally.count, 0)});
      tally.until = now + kTallyTime;
    } else if (is_over) {
      it = tallies.erase(it);
      continue;
    }
    next = std::min(next, tally.until);
    ++it;
  }
  is_tallying = !tallies.empty();
  if (is_tallying) {
    tally_timer.expires_at(next);
    tally_timer.async_wait(while_here([](Impl& impl, error_code e) {
      if (!e) impl.report_tallies();
    }));
  }
  for (const Report& report : reports)
    if (!ended) handlers.turned_away(report.source, report.what, report.count);
}

// Peers that we connect to.

void Peers::Impl::dial(Link link, const Address& address) {
  const std::string name = to_string(address);
  Dial& dial = *dials.at(link);
  error_code is_name;
  const auto literal = asio::ip::make_address(address.host, is_name);
  const auto port = static_cast<unsigned short>(address.port);
  if (!is_name) return try_endpoint(link, {literal, port}, name);
  const int id = ++dial.last_id;
  dial.tries[id] = {name, nullptr};
  dial.resolver.async_resolve(
      address.host, std::to_string(port), tcp::resolver::numeric_service,
      while_here([link, id](Impl& impl, error_code e, const tcp::resolver::results_type& found) {
        impl.on_resolved(link, id, e, found);
      }));
}

void Peers::Impl::on_resolved(Link link, int id, const error_code& e,
                              const tcp::resolver::results_type& found) {
  const auto it = dials.find(link);
  if (it == dials.end()) return;
  const std::string name = it->second->tries.at(id).name;
  if (e || found.empty())
    return fail_try(link, id, Loss::kSilent, fmt::format("does not resolve ({})", e.message()));
  for (const auto& entry : found) try_endpoint(link, entry.endpoint(), name);
  it->second->tries.erase(id);
}

void Peers::Impl::try_endpoint(Link link, const tcp::endpoint& endpoint, const std::string& name) {
  Dial& dial = *dials.at(link);
  const int id = ++dial.last_id;
  auto connection = std::make_shared<PeerConnection>(
      io, secret,
      PeerConnection::Events{while_here([link, id](Impl& impl) { impl.on_won(link, id); }),
                             receiver(link),
                             while_here([link, id](Impl& impl, const PeerConnection::End& why) {
                               if (impl.dials.contains(link))
                                 impl.fail_try(link, id, why.loss, why.why);
                               else
                                 impl.on_lost(link, why);
                             })});
  dial.tries[id] = {name, connection};
  connection->connect(endpoint);
}

void Peers::Impl::on_won(Link link, int id) {
  const DialRef dial = dials.extract(link).mapped();
  const ConnectionRef winner = dial->tries.extract(id).mapped().connection;
  dial->stop();
  admit(link, winner, std::move(dial->messages));
}

void Peers::Impl::fail_try(Link link, int id, Loss loss, const std::string& why) {
  Dial& dial = *dials.at(link);
  dial.failures.push_back({dial.tries.extract(id).mapped().name, loss, why});
  if (dial.tries.empty()) fail_dial(link);
}

// Where addresses failed in different ways, the one that tells most of the agent counts.
void Peers::Impl::fail_dial(Link link) {
  const DialRef dial = dials.extract(link).mapped();
  dial->stop();
  const auto& failures = dial->failures;
  Loss loss = Loss::kSilent;
  for (Loss more : {Loss::kClosed, Loss::kRefused, Loss::kStranger})
    if (std::ranges::count(failures, more, &Dial::Failure::loss)) loss = more;
  std::string why;
  for (const auto& failure : failures)
    why += failures.size() == 1
               ? failure.why
               : fmt::format("{}{}: {}", why.empty() ? "" : "; ", failure.name, failure.why);
  handlers.lost(link, loss, why);
}

// Links.

std::function<void(std::string_view)> Peers::Impl::receiver(Link link) {
  return while_here(
      [link](Impl& impl, std::string_view message) { impl.handlers.received(link, message); });
}

void Peers::Impl::admit(Link link, const ConnectionRef& connection,
                        std::vector<std::string> messages) {
  open.emplace(link, connection);
  for (std::string& message : messages) connection->send(std::move(message));
  handlers.opened(link, address_of(connection->endpoint()));
}

void Peers::Impl::on_lost(Link link, const PeerConnection::End& why) {
  open.erase(link);
  handlers.lost(link, why.loss, why.why);
}

void Peers::Impl::end() {
  ended = true;
  if (listener) listener->close();
  tally_timer.cancel();
  for (auto& [link, connection] : unproven) connection->close();
  for (auto& [link, connection] : open) connection->close();
  for (auto& [link, dial] : dials) dial->stop();
  for (auto& weak : finishing)
    if (auto connection = weak.lock()) connection->close();
  unproven.clear();
  open.clear();
  dials.clear();
}

Peers::Peers(asio::io_context& io, std::string secret, Handlers handlers)
    : impl_(std::make_shared<Impl>(io, std::move(secret), std::move(handlers))) {
  TESSERA_ASSERT(!impl_->secret.empty(), "agents: the secret is empty");
}

Peers::~Peers() { impl_->end(); }

int Peers::listen(const std::string& host, int port) try {
  TESSERA_ASSERT(!impl_->listener, "agents: listens already");
  TESSERA_CHECK(port >= 0 && port <= 65535, "agents: {} is no port; give one from 0 to 65535",
                port);
  auto listener = std::make_shared<detail::Listener>(
      impl_->io,
      impl_->while_here([](Impl& impl, tcp::socket& socket) { impl.accepted(std::move(socket)); }),
      impl_->while_here([](Impl& impl) { impl.make_room(); }));
  const int found = listener->listen("agents", host, port);
  impl_->listener = listener;
  return found;
} catch (const boost::system::system_error& e) {
  detail::raise<UserError>(
      fmt::format("agents: cannot listen on {}:{} ({}); is the limit of open files (ulimit -n) too "
                  "low?",
                  host, port, e.code().message()));
}

Link Peers::connect(const std::vector<Address>& addresses, std::chrono::milliseconds limit) {
  Impl& impl = *impl_;
  const Link link = ++impl.last_link;
  const auto dial = std::make_shared<Impl::Dial>(impl.io);
  impl.dials.emplace(link, dial);
  if (addresses.empty()) dial->failures.push_back({"", Loss::kSilent, "has no address"});
  for (const Address& address : addresses)
    if (address.port > 0 && address.port <= 65535)
      impl.dial(link, address);
    else
      dial->failures.push_back({to_string(address), Loss::kSilent, "is no port"});
  const bool is_over = dial->tries.empty();  // reported from the event loop all the same
  dial->timer.expires_at(is_over ? Clock::now() : detail::deadline_after(limit));
  dial->timer.async_wait(impl.while_here([link, limit](Impl& impl, error_code e) {
    const auto it = impl.dials.find(link);
    if (e || it == impl.dials.end()) return;
    for (const auto& [id, one] : it->second->tries)
      it->second->failures.push_back(
          {one.name, Loss::kSilent,
           fmt::format("no answer within {:.3g} s", std::chrono::duration<double>(limit).count())});
    impl.fail_dial(link);
  }));
  return link;
}

void Peers::send(Link link, std::string message) {
  TESSERA_ASSERT(message.size() <= kMaxMessageBytes, "agents: a message has {} bytes, more than {}",
                 message.size(), kMaxMessageBytes);
  if (const auto found = impl_->open.find(link); found != impl_->open.end())
    return found->second->send(std::move(message));
  const auto found = impl_->dials.find(link);
  if (found == impl_->dials.end()) return;
  // Too many end the link when it is made; until then only they are kept.
  Impl::Dial& dial = *found->second;
  if (dial.message_bytes > PeerConnection::kMaxQueuedBytes) return;
  dial.message_bytes += message.size() + PeerConnection::kBytesBeside;
  dial.messages.push_back(std::move(message));
}

void Peers::close(Link link) {
  if (const auto dial = impl_->dials.extract(link); !dial.empty()) return dial.mapped()->stop();
  const auto open = impl_->open.extract(link);
  if (open.empty()) return;
  std::erase_if(impl_->finishing, [](const auto& weak) { return weak.expired(); });
  impl_->finishing.push_back(open.mapped());
  open.mapped()->finish();
}

int Peers::num_links() const { return int(impl_->open.size()); }

int Peers::num_closing() const {
  return int(std::ranges::count_if(impl_->finishing, [](const auto& c) { return !c.expired(); }));
}

}  // namespace tessera::launcher
