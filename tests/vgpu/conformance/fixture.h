// What the statements about the driver share: device 0 is current, and each has a stream of its
// own.
#pragma once
#include <atomic>
#include <chrono>
#include <thread>

#include "tests/vgpu/support/client.h"

namespace vgpu_test {

class OnDevice : public testing::Test {
 protected:
  void SetUp() override {
    start();
    stream = new_stream();
  }
  void TearDown() override {
    EXPECT_EQ(cuda().stream_synchronize(stream), Result::kSuccess);
    EXPECT_EQ(cuda().stream_destroy(stream), Result::kSuccess);
  }
  StreamHandle stream = nullptr;
};

/// Keeps a stream from going on until it is opened.
class Gate {
 public:
  explicit Gate(StreamHandle stream) {
    check(cuda().launch_host_function(
              stream,
              [](void* gate) {
                while (!static_cast<Gate*>(gate)->open_)
                  std::this_thread::sleep_for(std::chrono::microseconds(50));
              },
              this),
          "host function");
  }
  void open() { open_ = true; }

 private:
  std::atomic<bool> open_ = false;
};

/// Kernels that several statements use.
inline const Module& common() {
  static const Module module(R"(
extern "C" __global__ void add(int* p, int n, int x) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) p[i] += x;
}
extern "C" __global__ void copy(const int* from, int* to, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) to[i] = from[i];
}
)");
  return module;
}

}  // namespace vgpu_test
