// A device for tests of kernels: the driver and NVRTC by dlopen, real or virtual, modules that are
// compiled when a test asks for them, and arrays in device memory. Everything runs on one stream
// and throws with the library's words. Invariant: nothing here depends on the runtime whose kernels
// it tests.
#pragma once
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/backend/cuda/driver_api.h"
#include "core/backend/cuda/kernels/text.h"

namespace tessera::cuda::test {

struct DriverFunctions {
#define FUNCTION(member, symbol, parameters) Result(*member) parameters;
#include "core/backend/cuda/driver_functions.def"
#undef FUNCTION
};
struct NvrtcFunctions {
#define FUNCTION(member, symbol, parameters) NvrtcResult(*member) parameters;
#include "core/backend/cuda/nvrtc_functions.def"
#undef FUNCTION
};

/// What a compilation gave; `good` is false where it failed.
struct Compiled {
  bool good = false;
  std::string log, cubin;
};
/// By the NVRTC that the loader finds; `architecture` as sm_90. Throws where there is none.
Compiled compile(const std::string& text, const std::string& architecture);

/// The first device of the driver that the loader finds.
class Device {
 public:
  /// Null where there is no driver or no device; `why()` says so.
  static Device* get();
  static const std::string& why();

  const DriverFunctions& driver() const { return driver_; }
  const std::string& architecture() const { return architecture_; }
  const std::string& name() const { return name_; }
  StreamHandle stream() const { return stream_; }

  /// The entry `name` of the text, which is compiled and loaded once.
  FunctionHandle function(const KernelText& text, const std::string& name);
  void launch_raw(FunctionHandle f, const Geometry& g, void** parameters);
  template <class... A>
  void launch(FunctionHandle f, const Geometry& g, A... arguments) {
    void* parameters[] = {&arguments...};
    launch_raw(f, g, parameters);
  }
  void synchronize();
  void check(Result r, const char* what) const;

 private:
  Device() = default;
  DriverFunctions driver_{};
  std::string name_, architecture_;
  StreamHandle stream_ = nullptr;
  std::map<std::string, ModuleHandle> modules_;
};

/// Device memory for `count` elements, filled from the host or with a pattern that is no number.
template <class T>
class Array {
 public:
  explicit Array(size_t count) : count_(count) {
    Device& d = *Device::get();
    d.check(d.driver().memory_allocate(&at_, count * sizeof(T) + 16), "memory_allocate");
  }
  explicit Array(std::span<const T> values) : Array(values.size()) { write(values); }
  explicit Array(const std::vector<T>& values) : Array(values.size()) {
    write(std::span<const T>(values));
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() { Device::get()->driver().memory_free(at_); }

  T* get() const { return reinterpret_cast<T*>(at_); }
  size_t size() const { return count_; }
  void write(std::span<const T> values) {
    Device& d = *Device::get();
    if (values.empty()) return;
    d.check(d.driver().copy_to_device(at_, values.data(), values.size() * sizeof(T), d.stream()),
            "copy_to_device");
    d.synchronize();
  }
  void fill(unsigned char byte) {
    Device& d = *Device::get();
    if (count_) d.check(d.driver().fill_8(at_, byte, count_ * sizeof(T), d.stream()), "fill_8");
  }
  std::vector<T> read() const {
    Device& d = *Device::get();
    std::vector<T> values(count_);
    if (count_)
      d.check(d.driver().copy_to_host(values.data(), at_, count_ * sizeof(T), d.stream()),
              "copy_to_host");
    d.synchronize();
    return values;
  }

 private:
  DevicePtr at_ = 0;
  size_t count_;
};
/// The tests of a fixture need a device.
class KernelTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!Device::get()) GTEST_SKIP() << Device::why();
  }
  Device& d() { return *Device::get(); }
};

// Bools are kept as bytes, since a vector of bool has no data.
using Bools = std::vector<uint8_t>;

}  // namespace tessera::cuda::test
