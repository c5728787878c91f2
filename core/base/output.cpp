#include "core/base/output.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "core/base/error.h"

namespace tessera {
namespace {

// This is known long after the write that failed, unlike its errno.
bool reader_has_left() {
  pollfd out{STDOUT_FILENO, POLLOUT, 0};
  return ::poll(&out, 1, 0) == 1 && (out.revents & (POLLERR | POLLHUP)) != 0;
}

}  // namespace

void reserve_standard_streams() {
  // The lowest number that is free, `fd`, gets what cannot be written: EBADF, as if still closed.
  for (int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(fd, F_GETFD) < 0) ::open("/dev/null", O_RDONLY);
  ::signal(SIGXFSZ, SIG_IGN);
}

void check_output() {
  const bool flushed = std::fflush(stdout) == 0;
  const int why = errno;
  if ((!flushed || std::ferror(stdout)) && reader_has_left()) return;
  TESSERA_CHECK(flushed, "standard output: cannot write it: {}", std::strerror(why));
  // A flush after one that failed has nothing left to write.
  TESSERA_CHECK(!std::ferror(stdout),
                "standard output: cannot write it; a part of what was printed is lost");
}

}  // namespace tessera
