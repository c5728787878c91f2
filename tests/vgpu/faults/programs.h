// What the programs with faults are made of.
#pragma once
#include "tests/vgpu/faults/child.h"

namespace vgpu_test {

inline constexpr int kCount = 1000;
inline constexpr size_t kMiB = size_t{1} << 20;

inline DevicePtr floats(size_t n) { return allocate(n * sizeof(float)); }
inline DevicePtr written(size_t n, StreamHandle s) {
  return upload(std::vector<float>(n, 1.0f), s);
}
inline int wait(StreamHandle s) { return cuda().stream_synchronize(s) == Result::kSuccess ? 0 : 2; }
inline void record(EventHandle e, StreamHandle s) { check(cuda().event_record(e, s), "record"); }
inline void wait_for(StreamHandle s, EventHandle e) {
  check(cuda().stream_wait_event(s, e, 0), "wait");
}
inline float* pinned(size_t n) {
  void* p;
  check(cuda().host_allocate(&p, n * sizeof(float), 0), "pinned");
  return static_cast<float*>(p);
}

}  // namespace vgpu_test
