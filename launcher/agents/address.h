// Where an agent listens, and the name of a connection to it.
#pragma once
#include <cstdint>
#include <string>

namespace tessera::launcher {

/// Where an agent can be reached: "node1" or an IPv4 or IPv6 address, and a port.
struct Address {
  std::string host;
  int port = 0;
  bool operator==(const Address&) const = default;
};

/// "node1:29500", "[fe80::1]:29500".
std::string to_string(const Address& address);

/// Names one connection in this process; numbers are not used again.
using Link = uint64_t;

}  // namespace tessera::launcher
