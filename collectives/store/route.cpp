#include "collectives/store/route.h"

#include <fmt/format.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

namespace tessera::detail {
namespace {

std::string numeric(const sockaddr* address, socklen_t size) {
  char text[NI_MAXHOST] = {};
  const bool ok = getnameinfo(address, size, text, sizeof text, nullptr, 0, NI_NUMERICHOST) == 0;
  return ok ? text : "";
}

}  // namespace

Route route_to(const std::string& host) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_DGRAM;
  if (const int error = getaddrinfo(host.c_str(), "9", &hints, &found); error != 0)
    return {"", "", fmt::format("does not resolve: {}", gai_strerror(error))};
  Route route{"", "", "no route to it from this host"};
  for (const addrinfo* a = found; a && route.here.empty(); a = a->ai_next) {
    const int fd = ::socket(a->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    sockaddr_storage mine{};
    socklen_t size = sizeof mine;
    if (fd >= 0 && ::connect(fd, a->ai_addr, a->ai_addrlen) == 0 &&
        getsockname(fd, reinterpret_cast<sockaddr*>(&mine), &size) == 0)
      route = {numeric(reinterpret_cast<sockaddr*>(&mine), size),
               numeric(a->ai_addr, a->ai_addrlen)};
    if (fd >= 0) ::close(fd);
  }
  freeaddrinfo(found);
  return route;
}

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address == "::1";
}

}  // namespace tessera::detail
