// By which addresses two hosts reach each other.
#pragma once
#include <string>

namespace tessera::detail {

/// Numeric addresses of both ends of the way from this host to another.
struct Route {
  std::string here, there;
  std::string error = {};  // not empty: there is no way, or the name does not resolve; both are ""
};
/// The way to `host`, a name or a numeric address. Sends nothing: a datagram socket is connected,
/// which makes the system choose an address for it.
Route route_to(const std::string& host);

/// Whether a numeric address leads back to the host that uses it: of IPv4 127.x.x.x, of IPv6 ::1.
bool is_loopback(const std::string& address);

}  // namespace tessera::detail
