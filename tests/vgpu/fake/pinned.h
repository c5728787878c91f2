// Pinned host memory, which copies use while the host goes on. Invariant: from the submission of a
// copy until the host has waited for it, the buffer is closed: for reading where the copy writes,
// for writing where it reads. So a program that reads too early faults, on every run.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tests/vgpu/fake/op.h"

namespace vgpu {

class Pinned {
 public:
  struct User {
    OpRef op;
    bool writes;
  };
  struct Buffer {
    size_t bytes = 0;
    std::vector<User> users;  // that the host has not waited for
  };

  void* allocate(size_t bytes);
  /// "": it is free again. Else why not.
  std::string free(void* p);
  /// The buffer that has `p` between its ends, and where it begins.
  Buffer* find(const void* p, uintptr_t* begin = nullptr);
  /// `op` uses the buffer from now on; returns the name of an op that does so too, with which no
  /// event orders it, or "".
  std::string use(const void* p, const OpRef& op, bool writes);
  /// The op that runs may touch it.
  void open(const void* p);
  /// As its users want it again.
  void close(const void* p);
  /// The host has waited for all that `host` counts.
  void host_has_waited(const Clock& host);

 private:
  static void protect(uintptr_t at, const Buffer& buffer);
  std::map<uintptr_t, Buffer> buffers_;
  size_t busy_ = 0;  // buffers with users
};

}  // namespace vgpu
