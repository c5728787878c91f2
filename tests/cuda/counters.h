// What the virtual driver counts.
#pragma once
#include <dlfcn.h>

#include "core/backend/cuda/stream.h"

namespace tessera::cuda {

/// How often the virtual driver ran an op of this name; -1 on a real card, which does not count.
inline int64_t runs_of(const char* name) {
  using Counter = Result (*)(const char* op, unsigned long long* counters);
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  const auto counter = reinterpret_cast<Counter>(dlsym(library, "vgpu_counters"));
  if (!counter) return -1;
  synchronize(compute_stream(0));
  unsigned long long c[3];
  counter(name, c);
  return int64_t(c[0]);
}

}  // namespace tessera::cuda
