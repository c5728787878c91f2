#ifdef __SANITIZE_THREAD__  // Asio fences what its mutexes order anyway; the sanitizer sees those
#pragma GCC diagnostic ignored "-Wtsan"
#endif

#include "collectives/store/tcp_store.h"

#include <fcntl.h>
#include <unistd.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/write.hpp>
#include <mutex>
#include <thread>

#include "collectives/store/wire.h"
#include "core/base/log.h"
#include "core/base/silence.h"

namespace tessera {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;
using Clock = std::chrono::steady_clock;

// How much longer than the server's deadline a client waits before it assumes that the server is
// gone.
constexpr Millis kSlack = std::chrono::seconds(5);

// A socket with an event loop of its own, so that every read and write can have a deadline.
class Connection {
 public:
  explicit Connection(std::string peer) : socket_(io_), peer_(std::move(peer)) {}

  /// Returns no error on success.
  error_code connect(const tcp::endpoint& endpoint, Clock::time_point deadline) {
    socket_ = tcp::socket(io_);
    error_code e = run(deadline, [&](auto done) { socket_.async_connect(endpoint, done); });
    if (e) return e;
    ::fcntl(socket_.native_handle(), F_SETFD, FD_CLOEXEC);
    error_code ignored;
    socket_.set_option(tcp::no_delay(true), ignored);
    return e;
  }

  void handshake(const std::string& key, Clock::time_point deadline) {
    std::string nonce = detail::random_bytes(wire::kNonceBytes);
    write(std::string(wire::kMagic) + nonce, deadline);
    std::string answer = read(wire::kHelloBytes + wire::kProofBytes, deadline);
    TESSERA_CHECK(answer.starts_with(wire::kMagic),
                  "store: {} is no Tessera store of this version; check MASTER_ADDR, MASTER_PORT",
                  peer_);
    std::string server = answer.substr(wire::kMagic.size(), wire::kNonceBytes);
    detail::Digest theirs;
    answer.copy(reinterpret_cast<char*>(theirs.data()), theirs.size(), wire::kHelloBytes);
    TESSERA_CHECK(detail::equal_digests(theirs, wire::proof("server", key, nonce, server)),
                  "store: {} holds another key; it serves another job, check TESSERA_STORE_KEY",
                  peer_);
    detail::Digest ours = wire::proof("client", key, nonce, server);
    write(std::string(ours.begin(), ours.end()), deadline);
  }

  /// Sends a request and returns the body of its answer.
  std::string exchange(const std::string& frame, Clock::time_point deadline) {
    write(frame, deadline);
    uint32_t n = wire::body_bytes(read(4, deadline).data());
    if (n == 0) fail("sent a broken frame");
    return read(n, deadline);
  }

 private:
  template <class Start>
  error_code run(Clock::time_point deadline, Start start) {
    error_code result = asio::error::would_block;
    start([&result](error_code e, size_t = 0) { result = e; });
    io_.restart();
    io_.run_until(deadline);
    if (result != asio::error::would_block) return result;
    error_code ignored;
    socket_.close(ignored);
    io_.run();
    return asio::error::timed_out;
  }
  void write(const std::string& bytes, Clock::time_point deadline) {
    error_code e =
        run(deadline, [&](auto done) { asio::async_write(socket_, asio::buffer(bytes), done); });
    if (e) fail(e.message());
  }
  std::string read(size_t n, Clock::time_point deadline) {
    std::string bytes(n, '\0');
    error_code e =
        run(deadline, [&](auto done) { asio::async_read(socket_, asio::buffer(bytes), done); });
    if (e) fail(e.message());
    return bytes;
  }
  [[noreturn]] void fail(const std::string& why) const {
    throw CommError(fmt::format("store: lost {} ({}); the launcher that serves it has ended or "
                                "stopped, see its output",
                                peer_, why),
                    "store", 0, {});
  }

  asio::io_context io_{1};
  tcp::socket socket_;
  std::string peer_;
};

[[noreturn]] void fail_to_open(const std::string& peer, const error_code& e) {
  throw CommError(fmt::format("store: cannot open a connection to {} ({}); is the limit of open "
                              "files (ulimit -n) too low?",
                              peer, e.message()),
                  "store", 0, {});
}

std::unique_ptr<Connection> make_connection(const std::string& peer) try {
  return std::make_unique<Connection>(peer);
} catch (const boost::system::system_error& e) {  // its event loop needs three files
  fail_to_open(peer, e.code());
}

}  // namespace

struct TcpStore::Impl {
  std::string peer, key;
  std::vector<tcp::endpoint> endpoints;
  pid_t owner = ::getpid();
  std::mutex mutex;
  std::vector<std::unique_ptr<Connection>> idle;
  Clock::time_point silent_until{};  // until then the server is not asked under a StoreTimeLimit

  std::unique_ptr<Connection> open(Millis timeout);
  std::string exchange(wire::Writer& request, Millis timeout);
  std::string exchange_within(const std::string& frame, Millis timeout, Millis slack);
  wire::Reader call(const char* name, wire::Writer request, std::string& answer, size_t asked = 0,
                    Millis timeout = Millis(0));
};

std::unique_ptr<Connection> TcpStore::Impl::open(Millis timeout) {
  auto deadline = detail::deadline_after(timeout);
  auto connection = make_connection(peer);
  error_code e = asio::error::timed_out;
  const auto start = Clock::now();
  auto say = start + Silence::kFirst;
  for (Millis pause(2);; pause = std::min(2 * pause, Millis(200))) {
    if (Clock::now() >= say) {
      logging::warn("store: no server at {} for {:.3g} s ({}); trying on for {:.3g} s", peer,
                    std::chrono::duration<double>(Clock::now() - start).count(), e.message(),
                    std::chrono::duration<double>(deadline - Clock::now()).count());
      say = Clock::now() + Silence::kAgain;
    }
    for (const tcp::endpoint& endpoint : endpoints) {
      e = connection->connect(endpoint, deadline);
      if (e == asio::error::no_descriptors) fail_to_open(peer, e);
      if (e) continue;
      connection->handshake(key,
                            std::max(deadline, Clock::now() + StoreTimeLimit::of_thread(kSlack)));
      return connection;
    }
    if (Clock::now() + pause >= deadline)
      throw CommError(fmt::format("store: no server at {} within {} ms ({}); is tlaunch running "
                                  "there, and are MASTER_ADDR and MASTER_PORT right?",
                                  peer, timeout.count(), e.message()),
                      "store", 0, {});
    std::this_thread::sleep_for(pause);
  }
}

std::string TcpStore::Impl::exchange(wire::Writer& request, Millis timeout) {
  TESSERA_CHECK(owner == ::getpid(),
                "store: process {} was forked from {}, which owns the connection; connect again",
                ::getpid(), owner);
  TESSERA_CHECK(request.fits(), "store: a request exceeds {} bytes; send fewer or smaller values",
                wire::kMaxFrameBytes);
  const Millis slack = StoreTimeLimit::of_thread(kSlack);
  const bool limited = slack < kSlack;
  if (limited) {
    std::lock_guard lock(mutex);
    if (Clock::now() < silent_until)
      throw CommError(
          fmt::format("store: {} did not answer a moment ago and is not asked again yet", peer),
          "store", 0, {});
  }
  try {
    return exchange_within(request.frame(), timeout, slack);
  } catch (const CommError&) {
    std::lock_guard lock(mutex);
    if (limited) silent_until = Clock::now() + slack;
    throw;
  }
}

std::string TcpStore::Impl::exchange_within(const std::string& frame, Millis timeout,
                                            Millis slack) {
  std::unique_ptr<Connection> connection;
  {
    std::lock_guard lock(mutex);
    if (!idle.empty()) {
      connection = std::move(idle.back());
      idle.pop_back();
    }
  }
  if (!connection) connection = open(slack);
  // A connection that fails is dropped here, with the request in progress on it.
  std::string answer = connection->exchange(frame, detail::deadline_after(timeout) + slack);
  std::lock_guard lock(mutex);
  idle.push_back(std::move(connection));
  return answer;
}

// Returns the fields of an answer whose status is kOk or kTooLarge (the Reader is then empty);
// throws for other statuses.
wire::Reader TcpStore::Impl::call(const char* name, wire::Writer request, std::string& answer,
                                  size_t asked, Millis timeout) {
  answer = exchange(request, timeout);
  wire::Reader in(answer);
  switch (wire::Status(in.code())) {
    case wire::Status::kOk: return in;
    case wire::Status::kTimeout: throw StoreTimeout(name, in.list(), asked, timeout);
    case wire::Status::kTooLarge: return wire::Reader("");
    case wire::Status::kRefused: throw UserError(in.text());
  }
  throw BugError(fmt::format("store {}: unknown status in an answer", name));
}

TcpStore::TcpStore(const std::string& host, int port, const std::string& key, Millis timeout) try
    : impl_(std::make_unique<Impl>()) {
  impl_->peer = fmt::format("{}:{}", host, port);
  impl_->key = key;
  asio::io_context io;
  error_code e;
  auto found = tcp::resolver(io).resolve(host, std::to_string(port), e);
  TESSERA_CHECK(!e, "store: host \"{}\" does not resolve ({}); check MASTER_ADDR", host,
                e.message());
  for (const auto& entry : found) impl_->endpoints.push_back(entry.endpoint());
  impl_->idle.push_back(impl_->open(timeout));
} catch (const boost::system::system_error& e) {
  fail_to_open(fmt::format("{}:{}", host, port), e.code());
}

TcpStore::~TcpStore() = default;

void TcpStore::multi_set(std::span<const std::string> keys, std::span<const std::string> values) {
  TESSERA_CHECK(keys.size() == values.size(), "store set: {} keys but {} values", keys.size(),
                values.size());
  // Each frame has as many pairs as fit.
  size_t begin = 0;
  while (begin < keys.size()) {
    size_t end = begin, bytes = 64;
    for (; end < keys.size(); ++end) {
      detail::check_key(keys[end]);
      detail::check_value(keys[end], values[end].size());
      bytes += keys[end].size() + values[end].size() + 8;
      if (end > begin && bytes > wire::kMaxFrameBytes) break;
    }
    wire::Writer request(wire::Op::kSet);
    request.list(keys.subspan(begin, end - begin)).list(values.subspan(begin, end - begin));
    std::string answer;
    impl_->call("set", std::move(request), answer);
    begin = end;
  }
}

std::vector<std::string> TcpStore::multi_get(std::span<const std::string> keys, Millis timeout) {
  if (keys.empty()) return {};
  auto deadline = detail::deadline_after(timeout);
  wire::Writer request(wire::Op::kGet);
  request.integer(timeout.count()).list(keys);
  std::string answer;
  if (request.fits()) {
    wire::Reader in = impl_->call("get", std::move(request), answer, keys.size(), timeout);
    if (wire::Status(answer[0]) == wire::Status::kOk) return in.list();
  }
  TESSERA_ASSERT(keys.size() > 1, "the value of key {} exceeds a frame", keys[0]);
  auto rest = [&] { return std::chrono::duration_cast<Millis>(deadline - Clock::now()); };
  std::vector<std::string> values = multi_get(keys.first(keys.size() / 2), rest());
  std::vector<std::string> more = multi_get(keys.subspan(keys.size() / 2), rest());
  values.insert(values.end(), std::move_iterator(more.begin()), std::move_iterator(more.end()));
  return values;
}

void TcpStore::wait(std::span<const std::string> keys, Millis timeout) {
  wire::Writer request(wire::Op::kWait);
  request.integer(timeout.count()).list(keys);
  std::string answer;
  impl_->call("wait", std::move(request), answer, keys.size(), timeout);
}

int64_t TcpStore::add(const std::string& key, int64_t delta) {
  std::string answer;
  return impl_->call("add", wire::Writer(wire::Op::kAdd).text(key).integer(delta), answer)
      .integer();
}

int64_t TcpStore::append(const std::string& key, std::string_view suffix) {
  std::string answer;
  return impl_->call("append", wire::Writer(wire::Op::kAppend).text(key).text(suffix), answer)
      .integer();
}

std::string TcpStore::compare_set(const std::string& key, std::string_view expected,
                                  std::string_view desired) {
  wire::Writer request(wire::Op::kCompareSet);
  request.text(key).text(expected).text(desired);
  std::string answer;
  return impl_->call("compare_set", std::move(request), answer).text();
}

bool TcpStore::check(std::span<const std::string> keys) {
  std::string answer;
  return impl_->call("check", wire::Writer(wire::Op::kCheck).list(keys), answer).integer() != 0;
}

bool TcpStore::delete_key(const std::string& key) {
  std::string answer;
  return impl_->call("delete", wire::Writer(wire::Op::kDelete).text(key), answer).integer() != 0;
}

int64_t TcpStore::num_keys(const std::string& prefix) {
  std::string answer;
  return impl_->call("num_keys", wire::Writer(wire::Op::kNumKeys).text(prefix), answer).integer();
}

}  // namespace tessera
