// One TCP connection between two agents, from its handshake to its end; peers.h makes links of
// them. Invariants: all calls and events are on the thread of the io_context, and no event comes
// from within a call; `ended` comes once, unless close() or finish() was called first, and no event
// follows it; the object lives until its last operation is over.
#pragma once
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "launcher/agents/peer_frames.h"
#include "launcher/agents/peers.h"

namespace tessera::launcher {

class PeerConnection : public std::enable_shared_from_this<PeerConnection> {
 public:
  struct End {
    Peers::Loss loss;
    std::string why;
    const char* offence = "";  // of a peer that connected to us and was turned away
  };
  struct Events {
    std::function<void()> proven;
    std::function<void(std::string_view message)> received;
    std::function<void(const End&)> ended;
  };
  using Endpoint = boost::asio::ip::tcp::endpoint;
  using Socket = boost::asio::ip::tcp::socket;

  /// A connection with more bytes of messages to be sent ends; each counts for kBytesBeside more.
  static constexpr size_t kMaxQueuedBytes = 16 << 20, kBytesBeside = 64;

  PeerConnection(boost::asio::io_context& io, const std::string& secret, Events events);

  /// Asks the proof of a peer that has connected to us, from `from`.
  void serve(Socket socket, const Endpoint& from);
  /// Connects to `endpoint` and asks its proof. It may take any time to connect.
  void connect(const Endpoint& endpoint);
  /// Queues a message of a proven connection.
  void send(std::string message);
  /// Closes it when what is queued has been sent and the peer has closed its side, or after 1 s.
  void finish();
  void close();

  const Endpoint& endpoint() const { return endpoint_; }

 private:
  enum class Step { kHello, kAnswer, kProof, kOpen };  // what the other side sends next

  void begin(Step step);
  void read();
  void on_read(const boost::system::error_code& e, size_t n);
  void on_handshake(size_t n);
  void on_hello();
  void on_answer();
  void on_proof();
  void open();
  void on_frames(size_t n);
  void write();
  void on_failure(const boost::system::error_code& e);
  void end(Peers::Loss loss, std::string why, const char* offence = "");

  boost::asio::io_context& io_;
  const std::string secret_;
  const Events events_;
  Socket socket_;
  boost::asio::steady_timer timer_;
  Endpoint endpoint_;
  Step step_ = Step::kHello;
  bool is_server_ = false, finishing_ = false, closed_ = false;
  std::string nonce_;     // ours
  std::string expected_;  // the proof of the other side
  std::string in_;        // the part of the handshake that is read, then room for bytes of frames
  size_t have_ = 0;       // bytes of that part
  std::optional<frames::Sealer> sealer_;
  std::optional<frames::Opener> opener_;
  std::string raw_;                // bytes of the handshake that are to be sent
  std::deque<std::string> queue_;  // messages that are to be sent
  std::string out_;                // what is being written
  size_t queued_bytes_ = 0;        // of both
  bool writing_ = false, cannot_write_ = false, overflowed_ = false;
};

}  // namespace tessera::launcher
