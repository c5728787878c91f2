#include "collectives/gloo/tcp_progress.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

namespace tessera::detail {
namespace {

// The part that is read of what Linux tells from 4.1 on: `tcp_info` of linux/tcp.h, which cannot be
// included beside netinet/tcp.h, whose own `tcp_info` ends before these numbers.
struct LinuxTcpInfo {
  char before[120];
  uint64_t acknowledged, received;
};

}  // namespace

TcpProgress tcp_progress(int fd) {
  LinuxTcpInfo info{};
  socklen_t size = sizeof info;
  const bool told = fd >= 0 && ::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0;
  if (!told || size < sizeof info) return {};
  return {int64_t(info.received), int64_t(info.acknowledged)};
}

}  // namespace tessera::detail
