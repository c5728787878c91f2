// Statements about NVRTC that need no driver: what is accepted, what is refused, what a text sees.
#include "tests/vgpu/support/client.h"

namespace vgpu_test {
namespace {

constexpr const char* kSm90 = "--gpu-architecture=sm_90";

Compiled with_defaults(const std::string& source) {
  return compile(source, {kSm90, "--std=c++20", "--fmad=false"});
}

TEST(Nvrtc, VersionIs13) {
  int major = 0, minor = -1;
  EXPECT_EQ(nvrtc().version(&major, &minor), NvrtcResult::kSuccess);
  EXPECT_EQ(major, 13);
  EXPECT_GE(minor, 0);
}

TEST(Nvrtc, CubinIsAnElfFileAndTheLogIsEmpty) {
  const Compiled c = with_defaults("extern \"C\" __global__ void f(float* p) { *p = 1; }");
  EXPECT_EQ(c.result, NvrtcResult::kSuccess) << c.log;
  EXPECT_EQ(c.cubin.substr(0, 4), "\177ELF");
  EXPECT_EQ(c.log, "");
}

TEST(Nvrtc, ErrorsNameTheTextAndTheLine) {
  const Compiled c = with_defaults("\n\nextern \"C\" __global__ void f() { nothing(); }");
  EXPECT_EQ(c.result, NvrtcResult::kCompilation);
  EXPECT_NE(c.log.find("kernels.cu"), std::string::npos) << c.log;
  EXPECT_NE(c.log.find("3"), std::string::npos) << c.log;
  EXPECT_NE(c.log.find("error"), std::string::npos) << c.log;
}

TEST(Nvrtc, UnknownOptionIsRefused) {
  EXPECT_EQ(compile("", {"--no-such-option"}).result, NvrtcResult::kInvalidOption);
}

TEST(Nvrtc, UnknownArchitectureIsRefused) {
  EXPECT_EQ(compile("", {"--gpu-architecture=sm_12"}).result, NvrtcResult::kInvalidOption);
}

TEST(Nvrtc, SystemHeadersAreNotFound) {
  EXPECT_EQ(with_defaults("#include <stdio.h>\n").result, NvrtcResult::kCompilation);
}

TEST(Nvrtc, DestroyClearsTheHandle) {
  ProgramHandle program;
  ASSERT_EQ(nvrtc().create(&program, "", "x.cu", 0, nullptr, nullptr), NvrtcResult::kSuccess);
  EXPECT_EQ(nvrtc().destroy(&program), NvrtcResult::kSuccess);
  EXPECT_EQ(program, nullptr);
}

TEST(Nvrtc, DefinitionsArriveBothWays) {
  const Compiled c = compile("static_assert(A + B == 5);", {kSm90, "-DA=2", "--define-macro=B=3"});
  EXPECT_EQ(c.result, NvrtcResult::kSuccess) << c.log;
}

TEST(Nvrtc, TextsSeeWhatTheyAreCompiledFor) {
  const Compiled c = with_defaults(R"(
#ifndef __CUDACC_RTC__
#error not NVRTC
#endif
extern "C" __global__ void f(int* p) {
#if __CUDA_ARCH__ != 900
#error another architecture
#endif
  *p = __cplusplus >= 202002L;
})");
  EXPECT_EQ(c.result, NvrtcResult::kSuccess) << c.log;
}

TEST(Nvrtc, SizesAndAlignments) {
  const Compiled c = with_defaults(R"(
static_assert(sizeof(long) == 8 && sizeof(size_t) == 8 && sizeof(wchar_t) == 4);
static_assert(sizeof(float2) == 8 && alignof(float2) == 8);
static_assert(sizeof(float3) == 12 && alignof(float3) == 4);
static_assert(sizeof(float4) == 16 && alignof(float4) == 16);
static_assert(sizeof(double2) == 16 && alignof(double2) == 16);
static_assert(sizeof(uint4) == 16 && alignof(uint4) == 16 && sizeof(ulonglong2) == 16);
static_assert(sizeof(uchar4) == 4 && alignof(uchar4) == 4 && sizeof(ushort2) == 4);
static_assert(sizeof(uint3) == 12 && sizeof(dim3) == 12);
struct __align__(16) A { float x; };
static_assert(sizeof(A) == 16);
)");
  EXPECT_EQ(c.result, NvrtcResult::kSuccess) << c.log;
}

TEST(Nvrtc, SpellingsOfKernels) {
  const Compiled c = with_defaults(R"(
#define KERNEL(name) extern "C" __global__ void name
constexpr int kThreads = 128;
extern "C" __global__ __launch_bounds__(kThreads) void a(float* p) { *p = 1; }
extern "C" __global__ void __launch_bounds__(2 * kThreads, 2) b(float* p) { *p = 1; }
KERNEL(c)(const float* __restrict__ p, float* __restrict__ q) { *q = *p; }
template <class T> __device__ __forceinline__ T twice(T x) { return x + x; }
template <class T> struct Twice { static __device__ T of(T x) { return twice(x); } };
static __device__ const float kTable[2] = {1, 2};
__constant__ float kConstants[2] = {3, 4};
extern "C" __global__ void d(const __grid_constant__ dim3 x, float* p) {
  extern __shared__ __align__(16) unsigned char bytes[];
  __shared__ alignas(16) float rows[4][4];
  static __shared__ float row[4];
  auto add = [&](float y) { return y + kTable[1] + kConstants[0]; };
  bytes[threadIdx.x] = 1, rows[0][0] = 2, row[1] = 3;
#pragma unroll
  for (int i = 0; i < 4; ++i) *p += add(Twice<float>::of(1.0f)) + x.x;
})");
  EXPECT_EQ(c.result, NvrtcResult::kSuccess) << c.log;
}

TEST(Nvrtc, SharedMemoryOfTemplates) {
  const Compiled c = with_defaults(R"(
template <int N> __device__ float sum(float x) {
  __shared__ float all[N];
  all[threadIdx.x] = x;
  __syncthreads();
  return all[0];
}
extern "C" __global__ void f(float* p) { *p = sum<32>(1) + sum<64>(2); }
)");
  EXPECT_EQ(c.result, NvrtcResult::kSuccess) << c.log;
}

}  // namespace
}  // namespace vgpu_test
