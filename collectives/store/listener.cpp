#ifdef __SANITIZE_THREAD__  // Asio fences what its mutexes order anyway; the sanitizer sees those
#pragma GCC diagnostic ignored "-Wtsan"
#endif

#include "collectives/store/listener.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/ip/host_name.hpp>
#include <boost/asio/ip/v6_only.hpp>
#include <cerrno>

#include "collectives/store/port_owner.h"
#include "core/base/error.h"

namespace tessera::detail {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

// Whether to listen on all addresses for those that are told `host`, which has been `found`. A
// host's own name may be one of loopback to itself (Debian's /etc/hosts has 127.0.1.1 for it),
// while others find its address elsewhere.
bool wants_all_addresses(const std::string& host, const tcp::resolver::results_type& found) {
  const bool back_here = std::ranges::any_of(
      found, [](const auto& entry) { return entry.endpoint().address().is_loopback(); });
  const auto first_label = [](const std::string& name) { return name.substr(0, name.find('.')); };
  error_code e;
  const std::string own = asio::ip::host_name(e);
  return back_here && !e && first_label(host) == first_label(own);
}

tcp::endpoint listening_endpoint(asio::io_context& io, const std::string& who,
                                 const std::string& host, unsigned short port) {
  // IPv4 comes to a socket of IPv6 too.
  const tcp::endpoint all(tcp::v6(), port);
  if (host.empty()) return all;
  error_code e;
  const auto found = tcp::resolver(io).resolve(host, std::to_string(port), e);
  TESSERA_CHECK(!e && !found.empty(), "{}: host \"{}\" does not resolve ({}); use an address", who,
                host, e.message());
  return wants_all_addresses(host, found) ? all : found.begin()->endpoint();
}

void try_to_listen(tcp::acceptor& acceptor, const tcp::endpoint& endpoint, error_code& e) {
  error_code ignored;
  acceptor.close(ignored);
  acceptor.open(endpoint.protocol(), e);
  if (e == asio::error::no_descriptors) throw boost::system::system_error(e);
  if (e) return;
  ::fcntl(acceptor.native_handle(), F_SETFD, FD_CLOEXEC);
  acceptor.set_option(tcp::acceptor::reuse_address(true));
  if (endpoint.address().is_v6()) acceptor.set_option(asio::ip::v6_only(false), ignored);
  acceptor.bind(endpoint, e);
  if (!e) acceptor.listen(1024, e);
}

}  // namespace

Listener::Listener(asio::io_context& io, std::function<void(Socket)> accepted,
                   std::function<void()> make_room)
    : io_(io),
      accepted_(std::move(accepted)),
      make_room_(std::move(make_room)),
      acceptor_(io),
      pause_(io) {}

int Listener::listen(const std::string& who, const std::string& host, int port) {
  const tcp::endpoint endpoint =
      listening_endpoint(io_, who, host, static_cast<unsigned short>(port));
  error_code e;
  try_to_listen(acceptor_, endpoint, e);
  const bool has_no_ipv6 = e == asio::error::address_family_not_supported ||
                           e == boost::system::errc::address_not_available;
  if (has_no_ipv6 && endpoint.address().is_v6() && endpoint.address().is_unspecified())
    try_to_listen(acceptor_, tcp::endpoint(tcp::v4(), endpoint.port()), e);
  const std::string place = host.empty() ? "all addresses" : host;
  if (e == asio::error::address_in_use) {
    const std::string owner = port_owner(port);
    raise<UserError>(
        fmt::format("{}: port {} on {} is used by {}; choose another port (0 = any free one)", who,
                    port, place, owner.empty() ? "another process" : owner));
  }
  TESSERA_CHECK(!e, "{}: cannot listen on {}:{} ({}); use an address of this machine", who, place,
                port, e.message());
  acceptor_.non_blocking(true);
  accept();
  return acceptor_.local_endpoint().port();
}

void Listener::close() {
  error_code ignored;
  acceptor_.close(ignored);
  pause_.cancel();
}

void Listener::accept() {
  acceptor_.async_wait(tcp::acceptor::wait_read, [self = shared_from_this()](error_code e) {
    if (e) return;
    while (self->acceptor_.is_open()) {
      const int fd = ::accept4(self->acceptor_.native_handle(), nullptr, nullptr,
                               SOCK_NONBLOCK | SOCK_CLOEXEC);
      if (fd < 0) break;
      tcp::socket socket(self->io_);
      error_code unusable, ignored;
      socket.assign(self->acceptor_.local_endpoint().protocol(), fd, unusable);
      if (unusable) {
        ::close(fd);
        continue;
      }
      socket.set_option(tcp::no_delay(true), ignored);
      socket.set_option(tcp::socket::keep_alive(true), ignored);
      self->accepted_(std::move(socket));
    }
    if (!self->acceptor_.is_open()) return;
    const bool no_room = errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS;
    if (!no_room) return self->accept();
    self->make_room_();
    // Do not spin on a connection that cannot be accepted.
    self->pause_.expires_after(std::chrono::milliseconds(20));
    self->pause_.async_wait([self](error_code stopped) {
      if (!stopped && self->acceptor_.is_open()) self->accept();
    });
  });
}

}  // namespace tessera::detail
