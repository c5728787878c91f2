// Faults within the blocks of the caching allocator, which the driver does not know of: the
// allocator tells the virtual GPU of its parts, and that names what touches them wrongly. Each
// fault ends the device, so it is made in a process of its own.
#include <cstdlib>

#include "core/base/error.h"
#include "tests/cuda/card.h"

namespace tessera::cuda {
namespace {

class CudaFaults : public OnCard {
 protected:
  void SetUp() override {
    const char* checked = std::getenv("VGPU_CHECK");
    if (!checked || std::string(checked) != "1")
      GTEST_SKIP() << "only the virtual GPU sees single accesses, with --check";
    GTEST_FLAG_SET(death_test_style, "threadsafe");  // the driver is up
    OnCard::SetUp();
  }
  /// Makes a fault: says what came of it and ends the process.
  template <class F>
  [[noreturn]] static void commit(F&& fault) {
    const Stream stream = compute_stream(0);
    const std::string error = error_of([&] {
      fault(stream);
      synchronize(stream);
    });
    std::fprintf(stderr, "the program got: %s\n", error.c_str());
    std::_Exit(error == "no error" ? 1 : 0);
  }
};

constexpr size_t kSizes[] = {1000, size_t(1) << 20};  // a piece of a slab, and a block

using testing::ExitedWithCode;

TEST_F(CudaFaults, AnOverrunWithinASlabOrABlockIsNamed) {
  for (size_t bytes : kSizes)
    EXPECT_EXIT(commit([&](const Stream& stream) {
                  Allocator& a = runtime_of(register_cuda()).allocator(0);
                  fill(a.allocate(bytes), 1, 1, bytes + 1, stream);
                }),
                ExitedWithCode(0),
                fmt::format("out of bounds.*an allocation of {} bytes, made by the caching "
                            "allocator",
                            bytes));
}

TEST_F(CudaFaults, AUseAfterFreeIsNamed) {
  for (size_t bytes : kSizes)
    EXPECT_EXIT(commit([&](const Stream& stream) {
                  Allocator& a = runtime_of(register_cuda()).allocator(0);
                  void* p = a.allocate(bytes);
                  fill(p, 1, 1, bytes, stream);
                  a.deallocate(p, bytes);
                  fill(p, 2, 1, bytes, stream);
                }),
                ExitedWithCode(0),
                fmt::format("use after free: byte 0 of an allocation of {} bytes", bytes));
}

TEST_F(CudaFaults, AReadOfWhatThePreviousOwnerWroteIsNamed) {
  for (size_t bytes : kSizes)
    EXPECT_EXIT(commit([&](const Stream& stream) {
                  Allocator& a = runtime_of(register_cuda()).allocator(0);
                  void* p = a.allocate(bytes);
                  fill(p, 1, 1, bytes, stream);
                  a.deallocate(p, bytes);
                  void* q = a.allocate(bytes);
                  std::vector<char> values(bytes);
                  if (p == q) copy(values.data(), kCPU, q, stream.device, bytes, stream);
                }),
                ExitedWithCode(0), "which nobody has written");
}

}  // namespace
}  // namespace tessera::cuda
