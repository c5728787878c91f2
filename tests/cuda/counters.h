// What the virtual driver counts.
#pragma once
#include <dlfcn.h>

#include "core/backend/cuda/stream.h"

namespace tessera::cuda {

/// How often the virtual driver has run an op of this name by now; -1 on a real card, which does
/// not count.
inline int64_t runs_so_far(const char* name) {
  using Counter = Result (*)(const char* op, unsigned long long* counters);
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  const auto counter = reinterpret_cast<Counter>(dlsym(library, "vgpu_counters"));
  if (!counter) return -1;
  unsigned long long c[3];
  counter(name, c);
  return int64_t(c[0]);
}
/// The same with all that was enqueued on the compute stream.
inline int64_t runs_of(const char* name) {
  synchronize(compute_stream(0));
  return runs_so_far(name);
}

}  // namespace tessera::cuda
