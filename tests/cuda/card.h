// What tests of the CUDA backend share: they run on every card there is, real or virtual, and are
// skipped where there is none.
#pragma once
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "core/backend/cuda/caching_allocator.h"
#include "core/backend/cuda/context.h"
#include "core/backend/cuda/copy.h"
#include "core/backend/cuda/library.h"
#include "core/backend/cuda/runtime.h"
#include "core/backend/cuda/stream.h"

namespace tessera::cuda {

/// The tests of a fixture need a card.
class OnCard : public testing::Test {
 protected:
  static void SetUpTestSuite() { register_cuda(); }
  void SetUp() override {
    if (device_count() == 0) GTEST_SKIP() << why_no_driver();
    stream_ = compute_stream(0);
  }
  Stream stream_;
};

/// Memory of a card with elements of type T, for one test.
template <class T>
class Array {
 public:
  Array(Allocator& allocator, size_t n)
      : allocator_(allocator), n_(n), at_(static_cast<T*>(allocator.allocate(n * sizeof(T)))) {}
  ~Array() { allocator_.deallocate(at_, n_ * sizeof(T)); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  T* data() const { return at_; }
  size_t size() const { return n_; }

  void write(const std::vector<T>& values, const Stream& stream) {
    copy(at_, stream.device, values.data(), kCPU, n_ * sizeof(T), stream);
  }
  /// Waits for the stream.
  std::vector<T> read(const Stream& stream) const {
    std::vector<T> values(n_);
    copy(values.data(), kCPU, at_, stream.device, n_ * sizeof(T), stream);
    synchronize(stream);
    return values;
  }

 private:
  Allocator& allocator_;
  const size_t n_;
  T* const at_;
};

/// An event whose happening the test decides, and that counts who asked for it.
class ManualEvent final : public Event {
 public:
  bool done() const override { return done_; }
  void wait() override { ++waits; }
  void wait_on(const Stream& stream) override { waited_on.push_back(stream); }
  void happen() { done_ = true; }

  int waits = 0;
  std::vector<Stream> waited_on;

 private:
  bool done_ = false;
};

template <class F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "no error";
}

}  // namespace tessera::cuda
