// An optional library in use: asked for until it fails, after which Tessera's own kernels compute.
// Invariant: one line of the log says so, unless the user has switched the library off.
#pragma once
#include <atomic>
#include <string>

#include "core/base/log.h"

namespace tessera::cuda {

/// Thread-safe.
template <class Functions>
class LibraryInUse {
 public:
  struct Library {
    const Functions* (*get)();
    bool (*is_wanted)();
    const std::string& (*why_none)();
    const char* computes;  // "products"
  };
  explicit LibraryInUse(const Library& library) : library_(library) {}

  /// Null where the library is missing, or has failed.
  const Functions* get() {
    if (failed_.load(std::memory_order_relaxed)) return nullptr;
    const Functions* f = library_.get();
    // fail() then warns nobody.
    if (!f && !library_.is_wanted()) failed_ = true;
    if (!f) fail(library_.why_none());
    return f;
  }
  void fail(const std::string& why) {
    if (!failed_.exchange(true))
      logging::warn("cuda: Tessera's own kernels compute {}, which may take longer: {}",
                    library_.computes, why);
  }

 private:
  const Library library_;
  std::atomic<bool> failed_ = false;
};

}  // namespace tessera::cuda
