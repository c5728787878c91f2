// Statements about devices and memory.
#include <cstring>
#include <numeric>

#include "tests/vgpu/conformance/fixture.h"

namespace vgpu_test {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

class Devices : public OnDevice {};
class Memory : public OnDevice {};
class Ranges : public OnDevice {};

int attribute(DeviceAttribute a) {
  int value = -1;
  check(cuda().device_attribute(&value, a, 0), "attribute");
  return value;
}

TEST_F(Devices, Numbers) {
  EXPECT_EQ(attribute(DeviceAttribute::kMaxThreadsPerBlock), 1024);
  EXPECT_EQ(attribute(DeviceAttribute::kWarpSize), 32);
  EXPECT_EQ(attribute(DeviceAttribute::kMaxGridX), 2147483647);
  EXPECT_EQ(attribute(DeviceAttribute::kMaxGridY), 65535);
  EXPECT_EQ(attribute(DeviceAttribute::kMaxGridZ), 65535);
  EXPECT_EQ(attribute(DeviceAttribute::kSharedBytesPerBlock), 48 << 10);
  EXPECT_EQ(attribute(DeviceAttribute::kUnifiedAddressing), 1);
  EXPECT_EQ(attribute(DeviceAttribute::kVirtualMemory), 1);
}
TEST_F(Devices, OfCapability90) {
  if (attribute(DeviceAttribute::kCapabilityMajor) != 9) GTEST_SKIP() << "another card";
  EXPECT_EQ(attribute(DeviceAttribute::kSharedBytesPerBlockOptIn), 227 << 10);
  EXPECT_EQ(attribute(DeviceAttribute::kSharedBytesPerMultiprocessor), 228 << 10);
  EXPECT_EQ(attribute(DeviceAttribute::kMaxThreadsPerMultiprocessor), 2048);
}
TEST_F(Devices, ThatAreNotThere) {
  DeviceOrdinal device;
  EXPECT_EQ(cuda().device_get(&device, -1), Result::kInvalidDevice);
  EXPECT_EQ(cuda().device_get(&device, device_count()), Result::kInvalidDevice);
}
TEST_F(Devices, ErrorsHaveNames) {
  const char* name = nullptr;
  EXPECT_EQ(cuda().error_name(Result::kNotReady, &name), Result::kSuccess);
  EXPECT_STREQ(name, "CUDA_ERROR_NOT_READY");
  EXPECT_EQ(cuda().error_name(Result{12345}, &name), Result::kInvalidValue);
  EXPECT_EQ(cuda().error_string(Result::kIllegalAddress, &name), Result::kSuccess);
  EXPECT_STREQ(name, "an illegal memory access was encountered");
}
TEST_F(Devices, PriorityGrowsDownwards) {
  int least = -1, greatest = 1;
  EXPECT_EQ(cuda().stream_priority_range(&least, &greatest), Result::kSuccess);
  EXPECT_EQ(least, 0);
  EXPECT_LT(greatest, 0);
}
TEST_F(Devices, CurrentContextIsOfTheThread) {
  ContextHandle here = nullptr, there = context_of(0);
  EXPECT_EQ(cuda().get_current(&here), Result::kSuccess);
  EXPECT_EQ(here, context_of(0));
  std::thread([&] { check(cuda().get_current(&there), "current"); }).join();
  EXPECT_EQ(there, nullptr);
}
TEST_F(Devices, CallsNeedAContext) {
  Result result = Result::kSuccess;
  std::thread([&] {
    DevicePtr p;
    result = cuda().memory_allocate(&p, 256);
  }).join();
  EXPECT_EQ(result, Result::kInvalidContext);
}

TEST_F(Memory, AllocationsAreAligned) {
  const DevicePtr p = allocate(1), q = allocate(1);
  EXPECT_EQ(p % 256, 0u);
  EXPECT_EQ(q % 256, 0u);
  EXPECT_EQ(cuda().memory_free(p), Result::kSuccess);
  EXPECT_EQ(cuda().memory_free(q), Result::kSuccess);
}
TEST_F(Memory, NothingIsNoAllocation) {
  DevicePtr p;
  EXPECT_EQ(cuda().memory_allocate(&p, 0), Result::kInvalidValue);
}
TEST_F(Memory, FreeOfAnAddressInsideIsRefused) {
  const DevicePtr p = allocate(4096);
  EXPECT_EQ(cuda().memory_free(p + 256), Result::kInvalidValue);
  EXPECT_EQ(cuda().memory_free(p), Result::kSuccess);
}
TEST_F(Memory, TooMuchIsOutOfMemoryAndHarmless) {
  size_t free_bytes = 0, total = 0;
  check(cuda().memory_info(&free_bytes, &total), "info");
  EXPECT_LE(free_bytes, total);
  DevicePtr p;
  EXPECT_EQ(cuda().memory_allocate(&p, 2 * total), Result::kOutOfMemory);
  EXPECT_EQ(cuda().memory_free(allocate(kMiB)), Result::kSuccess);
}
TEST_F(Memory, InfoCountsAllocations) {
  size_t before = 0, after = 0, total;
  check(cuda().memory_info(&before, &total), "info");
  const DevicePtr p = allocate(64 * kMiB);
  check(cuda().memory_info(&after, &total), "info");
  EXPECT_LE(after + 64 * kMiB, before);
  check(cuda().memory_free(p), "free");
}
TEST_F(Memory, CopiesComeBack) {
  std::vector<int> values(1000);
  std::iota(values.begin(), values.end(), 7);
  const DevicePtr p = upload(values, stream), q = allocate(4000);
  EXPECT_EQ(cuda().copy_on_device(q, p, 4000, stream), Result::kSuccess);
  EXPECT_EQ(download<int>(q, 1000, stream), values);
}
TEST_F(Memory, CopiesOfNothingAreFine) {
  int x = 0;
  const DevicePtr p = allocate(4);
  EXPECT_EQ(cuda().copy_to_device(p, &x, 0, stream), Result::kSuccess);
  EXPECT_EQ(cuda().copy_to_host(&x, p, 0, stream), Result::kSuccess);
  EXPECT_EQ(cuda().fill_8(p, 0, 0, stream), Result::kSuccess);
}
TEST_F(Memory, PageableSourceMayChangeAfterTheCall) {
  std::vector<int> values(1 << 18, 1);
  const DevicePtr p = allocate(values.size() * 4);
  check(cuda().copy_to_device(p, values.data(), values.size() * 4, stream), "copy");
  values.assign(values.size(), 2);
  for (int got : download<int>(p, values.size(), stream)) ASSERT_EQ(got, 1);
}
TEST_F(Memory, PageableTargetIsCompleteAfterTheCall) {
  const DevicePtr p = upload(std::vector<int>(1 << 18, 3), stream);
  std::vector<int> got(1 << 18);
  check(cuda().copy_to_host(got.data(), p, got.size() * 4, stream), "copy");
  for (int x : got) ASSERT_EQ(x, 3);
}
TEST_F(Memory, PinnedBuffersCarryCopies) {
  void *a, *b;
  check(cuda().host_allocate(&a, 4096, kHostAllocPortable), "pinned");
  check(cuda().host_allocate(&b, 4096, kHostAllocPortable), "pinned");
  std::memset(a, 5, 4096);
  const DevicePtr p = allocate(4096);
  EXPECT_EQ(cuda().copy_to_device(p, a, 4096, stream), Result::kSuccess);
  EXPECT_EQ(cuda().copy_to_host(b, p, 4096, stream), Result::kSuccess);
  EXPECT_EQ(cuda().stream_synchronize(stream), Result::kSuccess);
  EXPECT_EQ(std::memcmp(a, b, 4096), 0);
  EXPECT_EQ(cuda().host_free(a), Result::kSuccess);
  EXPECT_EQ(cuda().host_free(b), Result::kSuccess);
}
// At the address that the host has, on every device.
TEST_F(Memory, KernelsReachPinnedBuffers) {
  const Module module(R"(extern "C" __global__ void f(unsigned long long* p) {
  atomicMax(p + threadIdx.x % 2, (unsigned long long)threadIdx.x << 32);
})");
  void* p;
  check(cuda().host_allocate(&p, 4096, kHostAllocPortable), "pinned");
  std::memset(p, 0, 4096);
  run(module["f"], 1, 64, 0, stream, p);
  EXPECT_EQ(cuda().stream_synchronize(stream), Result::kSuccess);
  EXPECT_EQ(static_cast<uint64_t*>(p)[0], uint64_t{62} << 32);
  EXPECT_EQ(static_cast<uint64_t*>(p)[1], uint64_t{63} << 32);
  EXPECT_EQ(cuda().host_free(p), Result::kSuccess);
}
TEST_F(Memory, FillsCountElements) {
  const DevicePtr p = upload(std::vector<int>(4, -1), stream);
  EXPECT_EQ(cuda().fill_8(p, 1, 4, stream), Result::kSuccess);
  EXPECT_EQ(cuda().fill_16(p + 4, 0x0203, 2, stream), Result::kSuccess);
  EXPECT_EQ(cuda().fill_32(p + 8, 77, 1, stream), Result::kSuccess);
  EXPECT_EQ(download<int>(p, 4, stream), (std::vector<int>{0x01010101, 0x02030203, 77, -1}));
}
TEST_F(Memory, FillsAreAligned) {
  const DevicePtr p = allocate(64);
  EXPECT_EQ(cuda().fill_32(p + 2, 0, 1, stream), Result::kInvalidValue);
  EXPECT_EQ(cuda().fill_16(p + 1, 0, 1, stream), Result::kInvalidValue);
}
TEST_F(Memory, RowsAreCopied) {
  std::vector<int> values(6 * 8);
  std::iota(values.begin(), values.end(), 0);
  const DevicePtr p = upload(values, stream);
  std::vector<int> got(3 * 2, -1);
  Memcpy2D c = {};
  c.source_type = kMemoryTypeDevice, c.source_device = p, c.source_pitch = 8 * 4;
  c.source_x_bytes = 4, c.source_y = 2;
  c.target_type = kMemoryTypeHost, c.target_host = got.data(), c.target_pitch = 2 * 4;
  c.width_bytes = 8, c.height = 3;
  EXPECT_EQ(cuda().copy_2d(&c, stream), Result::kSuccess);
  EXPECT_EQ(cuda().stream_synchronize(stream), Result::kSuccess);
  EXPECT_EQ(got, (std::vector<int>{17, 18, 25, 26, 33, 34}));
  c.target_pitch = 4;
  EXPECT_EQ(cuda().copy_2d(&c, stream), Result::kInvalidValue);
}

// ---- virtual memory ----

AllocationProperties properties() {
  AllocationProperties p = {};
  p.type = kAllocationPinned, p.location = {kLocationDevice, 0};
  return p;
}
MemoryHandle create(size_t bytes) {
  const AllocationProperties p = properties();
  MemoryHandle m;
  check(cuda().physical_create(&m, bytes, &p, 0), "create");
  return m;
}
DevicePtr reserve(size_t bytes) {
  DevicePtr at;
  check(cuda().address_reserve(&at, bytes, 0, 0, 0), "reserve");
  return at;
}
void map(DevicePtr at, size_t bytes, MemoryHandle m) {
  const AccessDescription access = {{kLocationDevice, 0}, kAccessReadWrite};
  check(cuda().memory_map(at, bytes, 0, m, 0), "map");
  check(cuda().memory_set_access(at, bytes, &access, 1), "access");
}

TEST_F(Ranges, GranularityIs2MiB) {
  const AllocationProperties p = properties();
  size_t bytes = 0;
  EXPECT_EQ(cuda().memory_granularity(&bytes, &p, kGranularityMinimum), Result::kSuccess);
  EXPECT_EQ(bytes, 2 * kMiB);
  EXPECT_EQ(cuda().memory_granularity(&bytes, &p, kGranularityRecommended), Result::kSuccess);
  EXPECT_EQ(bytes, 2 * kMiB);
}
TEST_F(Ranges, SizesAreMultiplesOfIt) {
  const AllocationProperties p = properties();
  MemoryHandle m;
  DevicePtr at;
  EXPECT_EQ(cuda().physical_create(&m, kMiB, &p, 0), Result::kInvalidValue);
  EXPECT_EQ(cuda().address_reserve(&at, kMiB + 1, 0, 0, 0), Result::kInvalidValue);
}
TEST_F(Ranges, TooMuchIsOutOfMemory) {
  size_t bytes = 0;
  check(cuda().device_total_memory(&bytes, 0), "total");
  const AllocationProperties p = properties();
  MemoryHandle m;
  EXPECT_EQ(cuda().physical_create(&m, bytes / kMiB * kMiB * 2, &p, 0), Result::kOutOfMemory);
}
TEST_F(Ranges, AddressesCostNoMemory) {
  size_t before = 0, after = 0, total = 0;
  check(cuda().memory_info(&before, &total), "info");
  const DevicePtr at = reserve(4 * (total / kMiB * kMiB));
  check(cuda().memory_info(&after, &total), "info");
  EXPECT_EQ(before, after);
  EXPECT_EQ(cuda().address_free(at, 4 * (total / kMiB * kMiB)), Result::kSuccess);
}
TEST_F(Ranges, ACopyGoesAcrossMaps) {
  const DevicePtr at = reserve(4 * kMiB);
  const MemoryHandle a = create(2 * kMiB), b = create(2 * kMiB);
  map(at, 2 * kMiB, a), map(at + 2 * kMiB, 2 * kMiB, b);
  // The memory lives as long as it is mapped.
  EXPECT_EQ(cuda().physical_release(a), Result::kSuccess);
  EXPECT_EQ(cuda().physical_release(b), Result::kSuccess);
  EXPECT_EQ(cuda().fill_32(at, 9, kMiB, stream), Result::kSuccess);
  for (int x : download<int>(at, kMiB, stream)) ASSERT_EQ(x, 9);
  EXPECT_EQ(cuda().memory_unmap(at, 4 * kMiB), Result::kSuccess);
  EXPECT_EQ(cuda().address_free(at, 4 * kMiB), Result::kSuccess);
}
TEST_F(Ranges, MemoryKeepsItsContentElsewhere) {
  const DevicePtr at = reserve(4 * kMiB);
  const MemoryHandle m = create(2 * kMiB);
  map(at, 2 * kMiB, m);
  check(cuda().fill_32(at, 21, 100, stream), "fill");
  check(cuda().stream_synchronize(stream), "wait");
  check(cuda().memory_unmap(at, 2 * kMiB), "unmap");
  map(at + 2 * kMiB, 2 * kMiB, m);
  EXPECT_EQ(download<int>(at + 2 * kMiB, 100, stream), std::vector<int>(100, 21));
  check(cuda().memory_unmap(at + 2 * kMiB, 2 * kMiB), "unmap");
  EXPECT_EQ(cuda().physical_release(m), Result::kSuccess);
  EXPECT_EQ(cuda().address_free(at, 4 * kMiB), Result::kSuccess);
}
TEST_F(Ranges, WhatIsNotMappedMayBeUnmapped) {
  const DevicePtr at = reserve(2 * kMiB);
  EXPECT_EQ(cuda().memory_unmap(at, 2 * kMiB), Result::kSuccess);
  EXPECT_EQ(cuda().address_free(at, 2 * kMiB), Result::kSuccess);
}
TEST_F(Ranges, OneMemoryInOnePlaceAtATime) {
  const DevicePtr at = reserve(2 * kMiB);
  const MemoryHandle a = create(2 * kMiB), b = create(2 * kMiB);
  map(at, 2 * kMiB, a);
  EXPECT_NE(cuda().memory_map(at, 2 * kMiB, 0, b, 0), Result::kSuccess);
  check(cuda().memory_unmap(at, 2 * kMiB), "unmap");
  check(cuda().physical_release(a), "release"), check(cuda().physical_release(b), "release");
  check(cuda().address_free(at, 2 * kMiB), "free");
}
TEST_F(Ranges, MemoryIsBackWhenUnmappedAndReleased) {
  size_t before = 0, after = 0, total;
  const DevicePtr at = reserve(64 * kMiB);
  check(cuda().memory_info(&before, &total), "info");
  const MemoryHandle m = create(64 * kMiB);
  map(at, 64 * kMiB, m);
  check(cuda().physical_release(m), "release");
  check(cuda().memory_info(&after, &total), "info");
  EXPECT_LE(after + 64 * kMiB, before);
  check(cuda().memory_unmap(at, 64 * kMiB), "unmap");
  check(cuda().memory_info(&after, &total), "info");
  EXPECT_EQ(after, before);
  check(cuda().address_free(at, 64 * kMiB), "free");
}

}  // namespace
}  // namespace vgpu_test
