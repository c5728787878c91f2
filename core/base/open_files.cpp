#include "core/base/open_files.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <vector>

#include "core/base/error.h"

namespace tessera {

void check_open_files(std::string_view what, int more) {
  std::vector<int> files;
  files.reserve(size_t(more));
  bool too_many = false;
  while (int(files.size()) < more && !too_many) {
    const int fd = ::fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0);
    if (fd < 0 && errno != EMFILE) break;  // a closed standard error says nothing of the limit
    if (fd < 0)
      too_many = true;
    else
      files.push_back(fd);
  }
  for (int fd : files) ::close(fd);
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  TESSERA_CHECK(!too_many,
                "{}: too many open files: the limit is {} (ulimit -n), and about {} are needed; "
                "raise it, as with ulimit -n 1024",
                what, limit.rlim_cur, limit.rlim_cur - files.size() + size_t(more));
}

}  // namespace tessera
