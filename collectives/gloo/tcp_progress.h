// What the system knows of a connection that Gloo keeps to itself.
#pragma once
#include <cstdint>

namespace tessera::detail {

/// Bytes that a TCP connection has received, and those sent that the peer has acknowledged.
struct TcpProgress {
  int64_t received = -1, acknowledged = -1;  // -1: not known
};
/// Of the socket `fd`. Does not block.
TcpProgress tcp_progress(int fd);

}  // namespace tessera::detail
