// A descriptor by which one thread tells another, which polls, that a queue has items.
#pragma once
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "core/base/error.h"

namespace tessera::launcher {

/// The descriptor can be read from ring() until silence().
class Bell {
 public:
  Bell() : fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    TESSERA_CHECK(fd_ >= 0, "eventfd: {}", std::strerror(errno));
  }
  ~Bell() { ::close(fd_); }
  Bell(const Bell&) = delete;
  Bell& operator=(const Bell&) = delete;
  int fd() const { return fd_; }
  void ring() { (void)!::write(fd_, &kOne, sizeof kOne); }
  void silence() {
    uint64_t count = 0;
    (void)!::read(fd_, &count, sizeof count);
  }

 private:
  static constexpr uint64_t kOne = 1;
  int fd_;
};

}  // namespace tessera::launcher
