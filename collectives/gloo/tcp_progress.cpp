#include "collectives/gloo/tcp_progress.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstddef>

namespace tessera::detail {

TcpProgress tcp_progress(int fd) {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (fd < 0 || ::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return {};
  // Kernels before 4.1 fill in less.
  if (size < offsetof(tcp_info, tcpi_bytes_received) + sizeof info.tcpi_bytes_received) return {};
  return {int64_t(info.tcpi_bytes_received), int64_t(info.tcpi_bytes_acked)};
}

}  // namespace tessera::detail
