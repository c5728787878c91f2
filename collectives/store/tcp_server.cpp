#ifdef __SANITIZE_THREAD__  // Asio fences what its mutexes order anyway; the sanitizer sees those
#pragma GCC diagnostic ignored "-Wtsan"
#endif

#include "collectives/store/tcp_server.h"

#include <array>
#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/write.hpp>
#include <list>
#include <thread>

#include "collectives/store/listener.h"
#include "collectives/store/wire.h"

namespace tessera {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

class Session;

/// The state that all sessions share; only the server's thread uses it.
struct Shared {
  asio::io_context io{1};
  std::string key;
  std::shared_ptr<detail::Table> table = std::make_shared<detail::Table>();
  std::list<std::shared_ptr<Session>> sessions;
  std::list<std::weak_ptr<Session>> unproven;  // oldest first
  std::atomic<int> num_sessions{0};
};

// One connection. It reads a request and answers it before it reads the next, so it never holds
// more than one of each. All handlers run on the server's thread.
class Session : public std::enable_shared_from_this<Session> {
 public:
  Session(Shared& shared, tcp::socket socket)
      : shared_(shared), socket_(std::move(socket)), timer_(shared.io) {}

  void start(std::list<std::shared_ptr<Session>>::iterator self) {
    self_ = self;
    unproven_ = shared_.unproven.insert(shared_.unproven.end(), weak_from_this());
    is_unproven_ = true;
    timer_.expires_after(detail::kHandshakeTime);
    timer_.async_wait([s = shared_from_this()](error_code e) {
      if (!e && s->is_unproven_) s->close();
    });
    asio::async_read(socket_, asio::buffer(hello_), [s = shared_from_this()](error_code e, size_t) {
      if (s->go_on(e)) s->on_hello();
    });
  }

  void close() {
    if (closed_) return;
    closed_ = true;
    error_code ignored;
    socket_.close(ignored);
    timer_.cancel();
    if (waiter_) shared_.table->cancel(waiter_);
    if (is_unproven_) shared_.unproven.erase(unproven_);
    shared_.num_sessions--;
    auto keep = shared_from_this();
    shared_.sessions.erase(self_);
  }

 private:
  bool go_on(error_code e) {
    if (e) close();
    return !closed_;
  }

  void on_hello() {
    std::string_view hello(hello_.data(), hello_.size());
    if (hello.substr(0, wire::kMagic.size()) != wire::kMagic) return close();
    std::string client(hello.substr(wire::kMagic.size()));
    std::string nonce = detail::random_bytes(wire::kNonceBytes);
    detail::Digest ours = wire::proof("server", shared_.key, client, nonce);
    expected_ = wire::proof("client", shared_.key, client, nonce);
    out_ = std::string(wire::kMagic) + nonce + std::string(ours.begin(), ours.end());
    asio::async_write(socket_, asio::buffer(out_), [s = shared_from_this()](error_code e, size_t) {
      if (!s->go_on(e)) return;
      asio::async_read(s->socket_, asio::buffer(s->proof_), [s](error_code e, size_t) {
        if (s->go_on(e)) s->on_proof();
      });
    });
  }

  void on_proof() {
    if (!detail::equal_digests(proof_, expected_)) return close();
    shared_.unproven.erase(unproven_);
    is_unproven_ = false;
    timer_.cancel();
    read_request();
  }

  void read_request() {
    asio::async_read(socket_, asio::buffer(header_),
                     [s = shared_from_this()](error_code e, size_t) {
                       if (s->go_on(e)) s->on_header();
                     });
  }

  void on_header() {
    uint32_t n = wire::body_bytes(header_.data());
    if (n == 0) return close();
    body_.resize(n);
    asio::async_read(socket_, asio::buffer(body_), [s = shared_from_this()](error_code e, size_t) {
      if (s->go_on(e)) s->on_request();
    });
  }

  void on_request() {
    try {
      perform(wire::Reader(body_));
    } catch (const wire::BadFrame&) {
      close();
    } catch (const UserError& e) {
      reply(wire::Writer(wire::Status::kRefused).text(e.what()));
    }
  }

  void perform(wire::Reader in) {
    detail::Table& table = *shared_.table;
    auto op = wire::Op(in.code());
    wire::Writer ok(wire::Status::kOk);
    switch (op) {
      case wire::Op::kSet: {
        std::vector<std::string> keys = in.list(), values = in.list();
        in.finish();
        table.set(keys, values);
        return reply(ok);
      }
      case wire::Op::kGet:
      case wire::Op::kWait: {
        Millis timeout(in.integer());
        std::vector<std::string> keys = in.list();
        in.finish();
        return await(std::move(keys), op == wire::Op::kGet, timeout);
      }
      case wire::Op::kAdd: {
        std::string key = in.text();
        int64_t delta = in.integer();
        in.finish();
        return reply(ok.integer(table.add(key, delta)));
      }
      case wire::Op::kAppend: {
        std::string key = in.text(), suffix = in.text();
        in.finish();
        return reply(ok.integer(table.append(key, suffix)));
      }
      case wire::Op::kCompareSet: {
        std::string key = in.text(), expected = in.text(), desired = in.text();
        in.finish();
        return reply(ok.text(table.compare_set(key, expected, desired)));
      }
      case wire::Op::kCheck: {
        std::vector<std::string> keys = in.list();
        in.finish();
        return reply(ok.integer(table.check(keys)));
      }
      case wire::Op::kDelete: {
        std::string key = in.text();
        in.finish();
        return reply(ok.integer(table.remove(key)));
      }
      case wire::Op::kNumKeys: {
        std::string prefix = in.text();
        in.finish();
        return reply(ok.integer(table.count(prefix)));
      }
    }
    throw wire::BadFrame("unknown operation");
  }

  void await(std::vector<std::string> keys, bool want_values, Millis timeout) {
    uint64_t turn = ++turn_;
    auto deadline = detail::deadline_after(timeout);
    // The callback may run on any thread that sets a key, so it only posts.
    auto done = [weak = weak_from_this(), turn, io = &shared_.io](std::vector<std::string> values) {
      asio::post(*io, [weak, turn, values = std::move(values)] {
        auto s = weak.lock();
        if (s && !s->closed_ && s->turn_ == turn) s->on_values(values);
      });
    };
    waiter_ = shared_.table->wait(std::move(keys), want_values, std::move(done));
    timer_.expires_at(deadline);
    timer_.async_wait([s = shared_from_this(), turn](error_code e) {
      if (!e && !s->closed_ && s->turn_ == turn) s->on_deadline();
    });
    // If bytes or an end of stream come before the answer, the client has given up or broken the
    // protocol.
    socket_.async_wait(tcp::socket::wait_read, [s = shared_from_this(), turn](error_code) {
      if (s->turn_ == turn) s->close();
    });
  }

  void on_values(const std::vector<std::string>& values) {
    waiter_ = 0;
    timer_.cancel();
    reply(wire::Writer(wire::Status::kOk).list(values));
  }

  void on_deadline() {
    auto absent = shared_.table->cancel(waiter_);
    if (!absent) return;  // the values are being sent
    waiter_ = 0;
    reply(wire::Writer(wire::Status::kTimeout).list(*absent));
  }

  void reply(wire::Writer answer) {
    ++turn_;
    out_ = answer.fits() ? answer.frame() : wire::Writer(wire::Status::kTooLarge).frame();
    asio::async_write(socket_, asio::buffer(out_), [s = shared_from_this()](error_code e, size_t) {
      if (s->go_on(e)) s->read_request();
    });
  }

  Shared& shared_;
  tcp::socket socket_;
  asio::steady_timer timer_;
  std::list<std::shared_ptr<Session>>::iterator self_;
  std::list<std::weak_ptr<Session>>::iterator unproven_;
  bool is_unproven_ = false;
  bool closed_ = false;
  std::array<char, wire::kHelloBytes> hello_;
  detail::Digest proof_, expected_;
  std::array<char, 4> header_;
  std::string body_, out_;
  uint64_t waiter_ = 0;
  uint64_t turn_ = 0;  // moves with every wait and answer, so late events find out that they are
};

}  // namespace

struct TcpStoreServer::Impl {
  Shared shared;
  std::shared_ptr<detail::Listener> listener;
  int port = 0;
  std::thread thread;

  void on_accepted(tcp::socket socket);
  void close_oldest_stranger();
};

void TcpStoreServer::Impl::on_accepted(tcp::socket socket) {
  if (shared.unproven.size() >= detail::kMaxUnproven) close_oldest_stranger();
  auto session = std::make_shared<Session>(shared, std::move(socket));
  shared.num_sessions++;
  session->start(shared.sessions.insert(shared.sessions.end(), session));
}

void TcpStoreServer::Impl::close_oldest_stranger() {
  if (shared.unproven.empty()) return;
  if (auto oldest = shared.unproven.front().lock()) oldest->close();
}

TcpStoreServer::TcpStoreServer(const std::string& host, int port, const std::string& key) try
    : impl_(std::make_unique<Impl>()) {
  TESSERA_CHECK(!key.empty(), "store: the key is empty; make one with make_store_key()");
  impl_->shared.key = key;
  impl_->listener = std::make_shared<detail::Listener>(
      impl_->shared.io,
      [impl = impl_.get()](tcp::socket socket) { impl->on_accepted(std::move(socket)); },
      [impl = impl_.get()] { impl->close_oldest_stranger(); });
  impl_->port = impl_->listener->listen("store", host, port);
  impl_->thread = std::thread([impl = impl_.get()] { impl->shared.io.run(); });
} catch (const boost::system::system_error& e) {
  detail::raise<UserError>(
      fmt::format("store: cannot serve on {}:{} ({}); is the limit of open "
                  "files (ulimit -n) too low?",
                  host, port, e.code().message()));
}

TcpStoreServer::~TcpStoreServer() {
  asio::post(impl_->shared.io, [impl = impl_.get()] {
    impl->listener->close();
    while (!impl->shared.sessions.empty()) {
      auto session = impl->shared.sessions.front();
      session->close();
    }
    impl->shared.io.stop();
  });
  impl_->thread.join();
}

int TcpStoreServer::port() const { return impl_->port; }

std::shared_ptr<Store> TcpStoreServer::store() {
  return std::make_shared<MemoryStore>(impl_->shared.table);
}

void TcpStoreServer::forget(const std::string& prefix) { impl_->shared.table->remove_all(prefix); }

int TcpStoreServer::num_connections() const { return impl_->shared.num_sessions; }

std::string make_store_key() { return detail::to_hex(detail::random_bytes(32)); }

}  // namespace tessera
