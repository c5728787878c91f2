// Work that is captured as a graph: which memory it uses at each launch, and for how long.
#include "core/backend/cuda/capture.h"

#include "core/backend/cuda/launch.h"
#include "core/base/error.h"
#include "core/core.h"
#include "core/tensor/device_runtime.h"
#include "tests/cuda/card.h"

namespace tessera::cuda {
namespace {

constexpr int64_t kN = 1000, kBytes = 4 * kN;

class CudaCapture : public OnCard {
 protected:
  void SetUp() override {
    OnCard::SetUp();
    if (!IsSkipped()) card_ = device_of(0);
  }
  int64_t live() const { return memory_stats(card_).live_bytes; }
  Stream stream() const { return stream_of(card_); }
  Tensor filled(float value) const { return full({kN}, value, {kF32, card_}); }
  Tensor memory() const { return empty({kN}, kF32, card_); }
  static float first(const Tensor& t) { return t[0].item<float>(); }

  /// y = a x + b z, on the calling thread's stream and without a look at anybody's events, as
  /// kernels of ops are.
  void add(const Tensor& y, float a, const Tensor& x, float b, const Tensor& z) {
    auto at = [](const Tensor& t) { return static_cast<float*>(t.device_data()); };
    add_({{4, 1, 1}, {256, 1, 1}, 0}, stream(), at(y), a, at(x), b, at(z), int(kN));
  }
  /// y += x + c, by way of memory that is freed at once.
  void add_by_way(const Tensor& y, const Tensor& x, float c) {
    const Tensor temporary = memory();
    add(temporary, 1, x, c, ones_);
    add(y, 1, y, 1, temporary);
  }

  Device card_;
  Program program_{"add", R"(
extern "C" __global__ void add(float* y, float a, const float* x, float b, const float* z, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = a * x[i] + b * z[i];
})"};
  Kernel<float*, float, float*, float, float*, int> add_{program_, "add"};
  Tensor ones_;
};

TEST_F(CudaCapture, MemoryThatIsFreedStaysTheGraphs) {
  ones_ = filled(1);
  const Tensor x = filled(2), y = filled(0);
  add_by_way(y, x, 0);
  EXPECT_EQ(first(y), 2);
  const int64_t before = live();
  Ref<DeviceGraph> graph = runtime_of(card_).capture(0, [&] { add_by_way(y, x, 1); });
  EXPECT_EQ(live(), before + kBytes);
  EXPECT_EQ(first(y), 2) << "nothing has run";
  for (int k = 1; k <= 3; ++k) {
    graph->launch(stream());
    const Tensor others = filled(100);  // would overwrite the graph's
    EXPECT_EQ(first(y), float(2 + 3 * k));
    EXPECT_EQ(first(others), 100);
  }
  graph->launch(stream());
  graph = nullptr;  // while it runs
  EXPECT_EQ(live(), before);
  const Tensor others = filled(100);
  EXPECT_EQ(first(y), 14);
}

// A block of another stream, which does not wait for the stream of the graph by itself.
TEST_F(CudaCapture, MemoryOfAnotherStreamComesBackAfterTheLastLaunch) {
  ones_ = filled(1);
  const Tensor y = filled(0);
  const Stream beside = runtime_of(card_).copy_stream(0, 0);
  Tensor given;
  {
    StreamScope scope(beside);
    given = filled(3);
    cuda::synchronize(beside);
  }
  const void* block = given.device_data();
  Ref<DeviceGraph> graph = runtime_of(card_).capture(0, [&] {
    add(y, 1, y, 1, given);
    given = {};
  });
  cuda::synchronize(stream());
  graph->launch(stream());
  graph = nullptr;
  {
    StreamScope scope(beside);
    const Tensor others = filled(100);
    EXPECT_EQ(others.device_data(), block);
    cuda::synchronize(beside);
  }
  EXPECT_EQ(first(y), 3);
}

TEST_F(CudaCapture, WorkOfAGraphUsesABlockInTurn) {
  ones_ = filled(1);
  const Tensor x = filled(1), y = filled(0);
  const int64_t before = live();
  const Ref<DeviceGraph> graph = runtime_of(card_).capture(0, [&] {
    for (int k = 0; k < 5; ++k) add_by_way(y, x, float(k));
  });
  EXPECT_EQ(live(), before + kBytes) << "one block for five temporaries";
  graph->launch(stream());
  EXPECT_EQ(first(y), 15);
}

TEST_F(CudaCapture, ConstantsKeepTheirValues) {
  ones_ = filled(1);
  const Tensor x = filled(1), y = filled(0);
  const std::vector<float> tens(kN, 10);
  const Ref<DeviceGraph> graph = runtime_of(card_).capture(0, [&] {
    add_by_way(y, x, 1);  // leaves a block behind
    const Tensor constant = constant_memory(Meta::contiguous({kN}, kF32, card_));
    runtime_of(card_).copy(constant.device_data(), card_, tens.data(), kCPU, size_t(kBytes),
                           allocation_stream(0));
    add(y, 1, y, 1, constant);
  });
  for (int k = 1; k <= 3; ++k) {
    graph->launch(stream());
    EXPECT_EQ(first(y), float(12 * k));
  }
}

TEST_F(CudaCapture, AnErrorEndsTheCapture) {
  ones_ = filled(1);
  const Tensor x = filled(1), y = filled(0);
  const int64_t before = live();
  const auto failing = [&] {
    add_by_way(y, x, 1);
    throw UserError("it cannot go on");
  };
  EXPECT_THROW(runtime_of(card_).capture(0, failing), UserError);
  EXPECT_EQ(live(), before);
  add_by_way(y, x, 1);
  EXPECT_EQ(first(y), 2) << "the thread's stream runs what it is given";
  const Ref<DeviceGraph> graph = runtime_of(card_).capture(0, [&] { add_by_way(y, x, 1); });
  graph->launch(stream());
  EXPECT_EQ(first(y), 4);
}

}  // namespace
}  // namespace tessera::cuda
