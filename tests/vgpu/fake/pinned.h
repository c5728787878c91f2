// Pinned host memory, which copies use while the host goes on. Invariant: from the submission of a
// copy until the host has waited for it, the pages that it uses are closed: for reading where the
// copy writes, for writing where it reads. So a program that reads too early faults, on every run.
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
    uintptr_t begin, end;  // what it uses
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
  /// `op` uses these bytes of a buffer from now on; returns the name of an op that uses some of
  /// them too, with which no event orders it, or "".
  std::string use(const void* p, size_t bytes, const OpRef& op, bool writes);
  /// An op that uses the page of `at` and that the host has not waited for, or null.
  const Op* user_of_page(uintptr_t at);
  /// The op that runs may touch these bytes.
  void open(const void* p, size_t bytes);
  /// As their users want them again.
  void close(const void* p, size_t bytes);
  /// The device failed, and runs nothing any more: no op of it uses a buffer.
  void forget(int device);
  /// The host has waited for all that `host` counts.
  void host_has_waited(const Clock& host);

 private:
  template <class F>
  void drop_users(F ended);
  static void protect(const Buffer& buffer, uintptr_t begin, uintptr_t end);
  std::map<uintptr_t, Buffer> buffers_;
  size_t busy_ = 0;  // buffers with users
};

}  // namespace vgpu
