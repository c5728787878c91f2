// A disk that is soon full: a file system in memory, mounted where only this process and its
// children see it.
#pragma once
#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cstdint>
#include <string>

namespace tessera {

/// Mounts a file system of `bytes` over `folder`; what is written there beyond them fails with
/// ENOSPC. False where the system does not let this process mount. To be called in a forked child,
/// before it starts threads.
inline bool mount_small_disk(const std::string& folder, int64_t bytes) {
  if (unshare(CLONE_NEWNS) != 0) {  // without privileges: as root of a user namespace of its own
    const uid_t user = getuid();
    const gid_t group = getgid();
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return false;
    auto write_to = [](const char* path, const std::string& text) {
      int fd = open(path, O_WRONLY | O_CLOEXEC);
      bool whole = fd >= 0 && write(fd, text.data(), text.size()) == ssize_t(text.size());
      if (fd >= 0) close(fd);
      return whole;
    };
    if (!write_to("/proc/self/setgroups", "deny") ||
        !write_to("/proc/self/uid_map", "0 " + std::to_string(user) + " 1") ||
        !write_to("/proc/self/gid_map", "0 " + std::to_string(group) + " 1"))
      return false;
  }
  const std::string size = "size=" + std::to_string(bytes);
  return mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         mount("tmpfs", folder.c_str(), "tmpfs", MS_NOSUID | MS_NODEV, size.c_str()) == 0;
}

}  // namespace tessera
