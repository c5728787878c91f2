// Programs, kernels and launches on any card, real or virtual.
#include "core/backend/cuda/launch.h"

#include <algorithm>
#include <numeric>

#include "core/backend/cuda/exact_allocator.h"
#include "core/base/error.h"
#include "tests/cuda/card.h"

namespace tessera::cuda {
namespace {

constexpr const char* kText = R"(
struct Line { float slope; float offset; unsigned n; };
extern "C" __global__ void line(float* y, const float* x, Line l) {
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < l.n) y[i] = l.slope * x[i] + l.offset;
}
extern "C" __global__ void where(unsigned* out) {
  unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  out[block * blockDim.x * blockDim.y * blockDim.z + thread] = block * 1000 + thread;
}
extern "C" __global__ void nothing() {}
)";

constexpr const char* kReversed = R"(
extern "C" __global__ void reversed(unsigned* values, unsigned n) {
  extern __shared__ unsigned kept[];
  for (unsigned i = threadIdx.x; i < n; i += blockDim.x) kept[i] = values[i];
  __syncthreads();
  for (unsigned i = threadIdx.x; i < n; i += blockDim.x) values[i] = kept[n - 1 - i];
}
)";

struct Line {
  float slope, offset;
  unsigned n;
};

Geometry geometry(unsigned blocks, unsigned threads, unsigned shared_bytes = 0) {
  return {{blocks, 1, 1}, {threads, 1, 1}, shared_bytes};
}

class CudaLaunch : public OnCard {
 protected:
  void SetUp() override {
    OnCard::SetUp();
    if (!IsSkipped() && !why_no_nvrtc().empty()) GTEST_SKIP() << why_no_nvrtc();
  }
  ExactAllocator memory_{0, 0};
  Program program_{"launch_test", kText};
};

TEST_F(CudaLaunch, PassesParametersByValue) {
  Kernel<float*, const float*, Line> line(program_, "line");
  constexpr size_t kN = 1000;
  std::vector<float> x(kN), expected(kN);
  std::iota(x.begin(), x.end(), 0.0f);
  Array<float> in(memory_, kN), out(memory_, kN);
  in.write(x, stream_);
  for (int k = 1; k < 4; ++k) {
    Line l{float(k), 0.5f, kN};
    line(geometry(4, 256), stream_, out.data(), in.data(), l);
    l = {};  // it was read when the launch returned
    for (size_t i = 0; i < kN; ++i) expected[i] = float(k) * x[i] + 0.5f;
    EXPECT_EQ(out.read(stream_), expected);
  }
}

TEST_F(CudaLaunch, RunsEveryThreadOfAGrid) {
  Kernel<unsigned*> where(program_, "where");
  const unsigned blocks = 3 * 2 * 2, threads = 4 * 3 * 2;
  Array<unsigned> out(memory_, blocks * threads);
  where(Geometry{{3, 2, 2}, {4, 3, 2}, 0}, stream_, out.data());
  std::vector<unsigned> expected(blocks * threads);
  for (unsigned b = 0; b < blocks; ++b)
    for (unsigned t = 0; t < threads; ++t) expected[b * threads + t] = b * 1000 + t;
  EXPECT_EQ(out.read(stream_), expected);
}

TEST_F(CudaLaunch, GivesBlocksAllTheSharedMemoryThatACardHas) {
  Program program("reversed_test", kReversed);
  Kernel<unsigned*, unsigned> reversed(program, "reversed");
  const size_t most = properties(0).shared_bytes_per_block;
  for (const size_t bytes : {size_t(1024), size_t(48) << 10, most}) {
    const size_t n = bytes / 4;
    std::vector<unsigned> values(n);
    std::iota(values.begin(), values.end(), 0u);
    Array<unsigned> a(memory_, n);
    a.write(values, stream_);
    reversed(geometry(1, 256, unsigned(bytes)), stream_, a.data(), unsigned(n));
    std::reverse(values.begin(), values.end());
    EXPECT_EQ(a.read(stream_), values);
  }
  const std::string error =
      error_of([&] { reversed(geometry(1, 256, unsigned(most) + 4), stream_, nullptr, 0u); });
  EXPECT_NE(error.find("kernel reversed is launched with"), std::string::npos) << error;
}

TEST_F(CudaLaunch, RefusesGeometriesThatNoCardRuns) {
  Kernel<> nothing(program_, "nothing");
  nothing(geometry(1, 1), stream_);
  const auto refuses = [&](Geometry g) {
    const std::string error = error_of([&] { nothing(g, stream_); });
    EXPECT_NE(error.find("kernel nothing is launched with"), std::string::npos) << error;
    EXPECT_THROW(nothing(g, stream_), BugError);
  };
  refuses(geometry(0, 32));
  refuses(geometry(1, 0));
  refuses({{1, 0, 1}, {1, 1, 1}, 0});
  refuses({{1, 1, 1}, {1, 1, 0}, 0});
  refuses({{0x80000000u, 1, 1}, {1, 1, 1}, 0});
  refuses({{1, 65536, 1}, {1, 1, 1}, 0});
  refuses({{1, 1, 65536}, {1, 1, 1}, 0});
  refuses(geometry(1, 1025));
  refuses({{1, 1, 1}, {1, 1, 65}, 0});
  refuses({{1, 1, 1}, {65536, 65536, 1}, 0});  // overflows 32 bits
  synchronize(stream_);
}

TEST_F(CudaLaunch, SaysWhatAKernelNeeds) {
  Program program("reversed_test", kReversed);
  Kernel<unsigned*, unsigned> reversed(program, "reversed");
  const FunctionFacts facts = reversed.facts(0);
  EXPECT_EQ(facts.local_bytes, 0u);
  EXPECT_EQ(facts.shared_bytes, 0u);  // what a launch asks for is not the kernel's own
  EXPECT_GE(facts.most_threads, 256u);
  EXPECT_GE(reversed.blocks_per_multiprocessor(0, 256, 1024), 1);
}

TEST_F(CudaLaunch, NamesAKernelThatIsNotThere) {
  Kernel<> absent(program_, "absent");
  const std::string error = error_of([&] { absent(geometry(1, 1), stream_); });
  EXPECT_NE(error.find("launch_test has no kernel absent"), std::string::npos) << error;
  Program broken("broken_text", "extern \"C\" __global__ void f() { return y; }");
  Kernel<> f(broken, "f");
  EXPECT_NE(error_of([&] { f(geometry(1, 1), stream_); }).find("broken_text does not compile"),
            std::string::npos);
}

TEST_F(CudaLaunch, RunsOnEveryCard) {
  Kernel<unsigned*> where(program_, "where");
  for (int i = 0; i < device_count(); ++i) {
    ExactAllocator memory(i, 0);
    const Stream stream = compute_stream(i);
    Array<unsigned> out(memory, 64);
    where(geometry(2, 32), stream, out.data());
    const auto values = out.read(stream);
    EXPECT_EQ(values[0], 0u);
    EXPECT_EQ(values[63], 1031u);
  }
}

}  // namespace
}  // namespace tessera::cuda
