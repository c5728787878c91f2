// A stream that a test holds up.
#pragma once
#include <atomic>
#include <chrono>
#include <thread>

#include "core/backend/cuda/library.h"
#include "core/backend/cuda/stream.h"

namespace tessera::cuda {

/// Keeps a stream from going on until it is opened.
class Gate {
 public:
  explicit Gate(const Stream& stream) {
    driver().launch_host_function(static_cast<StreamHandle>(stream.handle), wait, this);
  }
  void open() { open_ = true; }

 private:
  static void wait(void* gate) {
    while (!static_cast<Gate*>(gate)->open_)
      std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  std::atomic<bool> open_ = false;
};

}  // namespace tessera::cuda
