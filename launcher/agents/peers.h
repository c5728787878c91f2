// Connections between the agents of a job: each pair of agents that talk has one TCP connection,
// over which both send whole messages. Invariants: a peer that has not proved within 5 s that it
// knows the job's secret is closed and nothing that it sent reaches the handler; each message is
// authenticated by a code over its direction, its number and its bytes, so that a message that was
// changed, repeated, reordered or cut ends the connection; all calls and handlers are on the thread
// of the given io_context, which lives longer, and no handler runs within a call. What is sent is
// not encrypted, and a proof tells that the peer is an agent of the job, not which one.
#pragma once
#include <boost/asio/io_context.hpp>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "launcher/agents/address.h"

namespace tessera::launcher {

class Peers {
 public:
  /// Why a connection ended or was not made.
  enum class Loss {
    kRefused,  // nothing listens there: the host is there, the agent is not
    kClosed,   // the other side closed it, or its process or host ended it (reset)
    kSilent,   // no connection within the time given, or no answer to the handshake
    kStranger  // it has another secret or is no agent, or a message was changed on its way
  };
  struct Handlers {
    /// A connection is proven, whoever made it. `address` is the other end's address as the kernel
    /// knows it; a peer that connected to us comes from a port it does not listen on.
    std::function<void(Link, const Address& address)> opened;
    std::function<void(Link, std::string_view message)> received;
    /// Comes once for each link that connect() returned or `opened` announced, and last, unless
    /// close() was called for it. `why` is text for people: "connection refused"; of several
    /// addresses "10.0.0.1:29500: connection refused; 10.1.0.1:29500: no answer within 5 s", where
    /// the first of kStranger, kRefused, kClosed and kSilent that occurred is the loss.
    std::function<void(Link, Loss, const std::string& why)> lost;
    /// Peers that were turned away: at most one call for each kind and source address in 10 s, with
    /// how many there were since the last; beyond 64 addresses in that time the source is "other
    /// addresses". `what` is one of "sent what is not the protocol", "does not know the secret",
    /// "did not prove itself within 5 s", "was closed to make room for others" (256 may be at their
    /// proof at a time). Who leaves after a whole hello, or without a word, is no offender: it may
    /// have reached us at another address first.
    std::function<void(const std::string& source, const char* what, int count)> turned_away;
  };

  /// Messages have at most this many bytes.
  static constexpr size_t kMaxMessageBytes = 1 << 20;

  /// `secret` is shared by all agents of a job, and not empty.
  Peers(boost::asio::io_context& io, std::string secret, Handlers handlers);
  /// Closes all connections, without calling handlers.
  ~Peers();
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  /// Listens on `host`, or where it is empty on all addresses of this machine, IPv6 included where
  /// there is any; port 0 is any free one. Returns the port. Once; a name is resolved while it
  /// blocks. Throws UserError, which for a port in use names the process that has it.
  int listen(const std::string& host, int port);

  /// Starts to connect to the first of `addresses` that proves the secret; they are tried at once
  /// where there are several or a name has several. Never blocks, also not while a name is resolved
  /// (but names are resolved one after another). `opened` or `lost` follows within `limit`.
  Link connect(const std::vector<Address>& addresses, std::chrono::milliseconds limit);

  /// Queues a message, also for a link that is not open yet; one for a link that has ended is
  /// dropped. A link whose peer does not take its messages, so that 16 MiB are queued (64 bytes
  /// beside each counted), is closed and reported as kSilent. Nothing leaves the queue before the
  /// event loop runs again. Throws BugError for a message that is too long.
  void send(Link link, std::string message);

  /// Ends a connection once what is queued has been sent, or after 1 s. Nothing more is reported
  /// of it.
  void close(Link link);

  /// How many links are open.
  int num_links() const;
  /// How many were closed and still have something to send.
  int num_closing() const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace tessera::launcher
