// oneDNN's engine, and a stream for each thread.
#pragma once
#include <oneapi/dnnl/dnnl.hpp>

#include "core/base/deterministic.h"
#include "core/base/parallel.h"

namespace tessera::cpu {

inline const dnnl::engine& engine() {
  static const dnnl::engine e(dnnl::engine::kind::cpu, 0);
  return e;
}
inline dnnl::stream& stream() {
  thread_local dnnl::stream s(engine());
  return s;
}

/// Sets the number of oneDNN's threads while it lives, around the making and around the running of
/// a primitive: one in deterministic mode, since oneDNN may split a sum by threads, and one where
/// `one` says that the work is not worth waking others.
class LibraryThreads {
 public:
  explicit LibraryThreads(bool one = false)
      : before_(one || deterministic_algorithms() ? num_threads() : 1) {
    if (before_ > 1) set_num_threads(1);
  }
  ~LibraryThreads() {
    if (before_ > 1) set_num_threads(before_);
  }
  LibraryThreads(const LibraryThreads&) = delete;
  LibraryThreads& operator=(const LibraryThreads&) = delete;

 private:
  const int before_;
};

}  // namespace tessera::cpu
