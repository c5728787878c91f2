#ifdef __SANITIZE_THREAD__  // Asio fences what its mutexes order anyway; the sanitizer sees those
#pragma GCC diagnostic ignored "-Wtsan"
#endif

#include "launcher/agents/peer_connection.h"

#include <fcntl.h>

#include <boost/asio/post.hpp>
#include <boost/asio/write.hpp>

#include "collectives/store/listener.h"
#include "core/base/error.h"

namespace tessera::launcher {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;
using Loss = Peers::Loss;

constexpr size_t kReadBytes = 1 << 16;
constexpr size_t kWriteBytes = 1 << 18;  // as many messages are sealed for one write
constexpr auto kFinishTime = std::chrono::seconds(1);

}  // namespace

PeerConnection::PeerConnection(asio::io_context& io, const std::string& secret, Events events)
    : io_(io), secret_(secret), events_(std::move(events)), socket_(io), timer_(io) {}

void PeerConnection::serve(Socket socket, const Endpoint& from) {
  endpoint_ = from;
  socket_ = std::move(socket);
  is_server_ = true;
  begin(Step::kHello);
  read();
}

void PeerConnection::connect(const Endpoint& endpoint) {
  endpoint_ = endpoint;
  error_code e;
  socket_.open(endpoint.protocol(), e);
  if (e) {
    asio::post(io_, [self = shared_from_this(), e] {
      self->end(Loss::kSilent, fmt::format("cannot open a connection ({})", e.message()));
    });
    return;
  }
  ::fcntl(socket_.native_handle(), F_SETFD, FD_CLOEXEC);
  socket_.async_connect(endpoint, [self = shared_from_this()](error_code e) {
    if (self->closed_) return;
    if (e == asio::error::connection_refused)
      return self->end(Loss::kRefused, "connection refused");
    if (e) return self->end(Loss::kSilent, e.message());
    // Where nothing listens on a port of this machine, it may be given to the connection itself.
    error_code ignored;
    if (self->socket_.local_endpoint(ignored) == self->endpoint_)
      return self->end(Loss::kRefused, "connection refused");
    self->socket_.set_option(tcp::no_delay(true), ignored);
    self->socket_.set_option(tcp::socket::keep_alive(true), ignored);
    self->nonce_ = detail::random_bytes(wire::kNonceBytes);
    self->raw_ = std::string(frames::kMagic) + self->nonce_;
    self->begin(Step::kAnswer);
    self->write();
    self->read();
  });
}

// The first step of a side: from here on it has five seconds.
void PeerConnection::begin(Step step) {
  step_ = step;
  in_.assign(step == Step::kHello ? frames::kHelloBytes : frames::kAnswerBytes, '\0');
  timer_.expires_after(detail::kHandshakeTime);
  timer_.async_wait([self = shared_from_this()](error_code e) {
    if (!e && self->step_ != Step::kOpen)
      self->end(Loss::kSilent, "did not prove itself within 5 s",
                "did not prove itself within 5 s");
  });
}

void PeerConnection::read() {
  socket_.async_read_some(
      asio::buffer(in_.data() + have_, in_.size() - have_),
      [self = shared_from_this()](error_code e, size_t n) { self->on_read(e, n); });
}

void PeerConnection::on_read(const error_code& e, size_t n) {
  if (closed_) return;
  if (e) return on_failure(e);
  if (step_ != Step::kOpen)
    on_handshake(n);
  else if (!finishing_)  // what comes after finish() is read, since a reset would follow otherwise
    on_frames(n);
  if (!closed_) read();
}

void PeerConnection::on_handshake(size_t n) {
  have_ += n;
  const std::string_view got = std::string_view(in_).substr(0, have_);
  const std::string_view magic = frames::kMagic.substr(0, have_);
  if (step_ != Step::kProof && !got.starts_with(magic))
    return end(Loss::kStranger, "sent what is not the protocol of agents of this version",
               "sent what is not the protocol");
  if (have_ < in_.size()) return;
  have_ = 0;
  switch (step_) {
    case Step::kHello: return on_hello();
    case Step::kAnswer: return on_answer();
    case Step::kProof: return on_proof();
    case Step::kOpen: break;
  }
}

void PeerConnection::on_hello() {
  const std::string client = in_.substr(frames::kMagic.size());
  nonce_ = detail::random_bytes(wire::kNonceBytes);
  expected_ = frames::proof(frames::kClient, secret_, client, nonce_);
  raw_ = std::string(frames::kMagic) + nonce_ +
         frames::proof(frames::kServer, secret_, client, nonce_);
  const std::string key = frames::session_key(secret_, client, nonce_);
  sealer_.emplace(key, frames::Direction::kToClient);
  opener_.emplace(key, frames::Direction::kToServer);
  step_ = Step::kProof;
  in_.assign(wire::kProofBytes, '\0');
  write();
}

void PeerConnection::on_answer() {
  const std::string server = in_.substr(frames::kMagic.size(), wire::kNonceBytes);
  const std::string theirs = in_.substr(frames::kHelloBytes);
  if (!frames::equal_proofs(theirs, frames::proof(frames::kServer, secret_, nonce_, server))) {
    // Bytes that prove nothing, by which the other side can tell this end from that of a peer that
    // has found another address of it first.
    error_code ignored;
    socket_.non_blocking(true, ignored);
    socket_.write_some(asio::buffer(detail::random_bytes(wire::kProofBytes)), ignored);
    return end(Loss::kStranger, "has another secret");
  }
  raw_ = frames::proof(frames::kClient, secret_, nonce_, server);
  const std::string key = frames::session_key(secret_, nonce_, server);
  sealer_.emplace(key, frames::Direction::kToServer);
  opener_.emplace(key, frames::Direction::kToClient);
  open();
}

void PeerConnection::on_proof() {
  if (!frames::equal_proofs(in_, expected_))
    return end(Loss::kStranger, "has another secret", "does not know the secret");
  open();
}

void PeerConnection::open() {
  step_ = Step::kOpen;
  timer_.cancel();
  in_.assign(kReadBytes, '\0');
  write();
  events_.proven();
}

void PeerConnection::on_frames(size_t n) {
  opener_->take(std::string_view(in_).substr(0, n));
  std::string_view body;
  while (!closed_ && !finishing_) {
    switch (opener_->next(body)) {
      case frames::Opener::Found::kBody: events_.received(body); break;
      case frames::Opener::Found::kPart: return;
      case frames::Opener::Found::kBroken:
        return end(Loss::kStranger, "sent a message that was changed on its way");
    }
  }
}

void PeerConnection::send(std::string message) {
  if (closed_ || finishing_ || overflowed_) return;
  queued_bytes_ += message.size() + kBytesBeside;
  if (queued_bytes_ > kMaxQueuedBytes) {
    overflowed_ = true;
    queue_.clear();
    asio::post(io_, [self = shared_from_this()] {
      self->end(Loss::kSilent, "does not take its messages: 16 MiB are queued");
    });
    return;
  }
  queue_.push_back(std::move(message));
  write();
}

// Writes what is queued, one batch at a time.
void PeerConnection::write() {
  if (writing_ || closed_ || cannot_write_) return;
  size_t bytes = 0;
  out_ = std::move(raw_);
  raw_.clear();
  while (step_ == Step::kOpen && !queue_.empty() && out_.size() < kWriteBytes) {
    sealer_->seal(queue_.front(), out_);
    bytes += queue_.front().size() + kBytesBeside;
    queue_.pop_front();
  }
  if (out_.empty()) {
    error_code ignored;
    if (finishing_) socket_.shutdown(tcp::socket::shutdown_send, ignored);
    return;
  }
  writing_ = true;
  asio::async_write(socket_, asio::buffer(out_),
                    [self = shared_from_this(), bytes](error_code e, size_t) {
                      self->writing_ = false;
                      self->queued_bytes_ -= bytes;
                      // The end is reported where it is read, after what came before it.
                      self->cannot_write_ = bool(e);
                      self->write();
                    });
}

void PeerConnection::finish() {
  if (closed_ || finishing_) return;
  finishing_ = true;
  timer_.expires_after(kFinishTime);
  timer_.async_wait([self = shared_from_this()](error_code e) {
    if (!e) self->close();
  });
  write();
}

void PeerConnection::close() {
  if (closed_) return;
  closed_ = true;
  error_code ignored;
  socket_.close(ignored);
  timer_.cancel();
  queue_.clear();
}

void PeerConnection::on_failure(const error_code& e) {
  const bool half_a_hello = step_ == Step::kHello && have_ > 0;
  const char* offence = half_a_hello ? "sent what is not the protocol" : "";
  if (e == asio::error::eof) {
    const bool within = opener_ && step_ == Step::kOpen && opener_->within_frame();
    return end(Loss::kClosed,
               step_ != Step::kOpen ? "closed the connection before it had proved itself"
               : within             ? "closed the connection within a message"
                                    : "closed the connection",
               offence);
  }
  const bool is_reset = e == asio::error::connection_reset ||
                        e == asio::error::connection_aborted || e == asio::error::broken_pipe;
  end(is_reset ? Loss::kClosed : Loss::kSilent, e.message(), offence);
}

void PeerConnection::end(Loss loss, std::string why, const char* offence) {
  if (closed_) return;
  close();
  if (!finishing_) events_.ended({loss, std::move(why), offence});
}

}  // namespace tessera::launcher
