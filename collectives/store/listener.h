// Listens where strangers may connect, for the store's server and for agents. Invariant: neither a
// connection that cannot be accepted nor a lack of files ends the listening or makes it spin.
#pragma once
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <functional>
#include <memory>
#include <string>

namespace tessera::detail {

/// How long a peer may take to prove that it knows the secret, and how many may be at it at a time:
/// the oldest is closed for one more.
inline constexpr auto kHandshakeTime = std::chrono::seconds(5);
inline constexpr size_t kMaxUnproven = 256;

class Listener : public std::enable_shared_from_this<Listener> {
 public:
  using Socket = boost::asio::ip::tcp::socket;

  /// `accepted` gets each connection. `make_room` is called when there is no file for one, and
  /// closes the connection of a stranger. Both run on the thread of `io`.
  Listener(boost::asio::io_context& io, std::function<void(Socket)> accepted,
           std::function<void()> make_room);

  /// Listens on host:port and returns the port; port 0 is any free one. On all addresses, those of
  /// IPv6 included where there are any, if `host` is empty or a name of this machine that it takes
  /// for one of loopback itself (127.0.1.1 in /etc/hosts). Blocks while a name is resolved. Throws
  /// UserError whose text begins with `who`, and which for a port in use names the process that has
  /// it; boost::system::system_error where there is no file for a socket.
  int listen(const std::string& who, const std::string& host, int port);
  /// Nothing is called afterwards.
  void close();

 private:
  void accept();

  boost::asio::io_context& io_;
  std::function<void(Socket)> accepted_;
  std::function<void()> make_room_;
  boost::asio::ip::tcp::acceptor acceptor_;
  boost::asio::steady_timer pause_;
};

}  // namespace tessera::detail
