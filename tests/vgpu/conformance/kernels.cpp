// Statements about modules, launches and what kernels compute: warps, barriers, atomics, integers
// and conversions, each with the numbers that a card gives.
#include <cmath>
#include <limits>

#include "tests/vgpu/conformance/fixture.h"

namespace vgpu_test {
namespace {

class Modules : public OnDevice {};
class Launches : public OnDevice {};
class Kernels : public OnDevice {
 protected:
  /// What one block of `threads` leaves in out[0 .. count) of ints.
  std::vector<int> block(const char* body, unsigned threads, size_t count) {
    const std::string text = std::string("extern \"C\" __global__ void f(int* out) {\n") +
                             "  const int t = threadIdx.x;\n" + body + "\n}\n";
    const Module module(text);
    const DevicePtr out = upload(std::vector<int>(count, -7), stream);
    run(module["f"], 1, threads, 0, stream, out);
    const std::vector<int> got = download<int>(out, count, stream);
    check(cuda().module_unload(module.handle), "unload");
    return got;
  }
  /// The same for f(in[t]) of one thread each.
  template <class From, class To>
  std::vector<To> map(const char* from, const char* to, const char* expression,
                      const std::vector<From>& in) {
    const std::string text = std::string("extern \"C\" __global__ void f(const ") + from +
                             "* in, " + to + "* out) {\n  const " + from +
                             " x = in[threadIdx.x];\n" + "  out[threadIdx.x] = " + expression +
                             ";\n}\n";
    const Module module(text);
    const DevicePtr a = upload(in, stream), b = allocate(in.size() * sizeof(To));
    run(module["f"], 1, static_cast<unsigned>(in.size()), 0, stream, a, b);
    const std::vector<To> got = download<To>(b, in.size(), stream);
    check(cuda().module_unload(module.handle), "unload");
    return got;
  }
};

std::vector<int> numbers(size_t count, int (*f)(int)) {
  std::vector<int> v(count);
  for (size_t i = 0; i < count; ++i) v[i] = f(static_cast<int>(i));
  return v;
}

TEST_F(Modules, KernelsAreFoundByName) {
  FunctionHandle f;
  EXPECT_EQ(cuda().module_function(&f, common().handle, "add"), Result::kSuccess);
  EXPECT_EQ(cuda().module_function(&f, common().handle, "nothing"), Result::kNotFound);
}
TEST_F(Modules, WhatIsNoImageIsRefused) {
  ModuleHandle module;
  EXPECT_NE(cuda().module_load(&module, "no image, and no text of PTX either"), Result::kSuccess);
}
TEST_F(Modules, AttributesOfFunctions) {
  const Module module(R"(extern "C" __global__ void __launch_bounds__(256) f(float* p) {
    __shared__ float all[256];
    all[threadIdx.x] = p[threadIdx.x];
    __syncthreads();
    p[threadIdx.x] = all[255 - threadIdx.x];
  })");
  int value = -1;
  EXPECT_EQ(cuda().function_attribute(&value, FunctionAttribute::kMaxThreads, module["f"]),
            Result::kSuccess);
  EXPECT_EQ(value, 256);
  EXPECT_EQ(cuda().function_attribute(&value, FunctionAttribute::kSharedBytes, module["f"]),
            Result::kSuccess);
  EXPECT_EQ(value, 1024);
  EXPECT_EQ(cuda().function_attribute(&value, FunctionAttribute::kLocalBytes, module["f"]),
            Result::kSuccess);
  EXPECT_EQ(value, 0);
  EXPECT_EQ(cuda().function_attribute(&value, FunctionAttribute::kRegisters, module["f"]),
            Result::kSuccess);
  EXPECT_GT(value, 0);
  EXPECT_EQ(
      cuda().function_attribute(&value, FunctionAttribute::kMaxDynamicSharedBytes, module["f"]),
      Result::kSuccess);
  EXPECT_GE(value, 46 << 10);
  const DevicePtr p = allocate(4096);
  EXPECT_EQ(try_launch(module["f"], 1, 512, 1, 1, 0, stream, {const_cast<DevicePtr*>(&p)}),
            Result::kInvalidValue);
}
TEST_F(Modules, OccupancyFollowsThreadsAndSharedMemory) {
  int blocks = 0;
  EXPECT_EQ(cuda().occupancy(&blocks, common()["add"], 1024, 0), Result::kSuccess);
  EXPECT_EQ(blocks, 2);
  EXPECT_EQ(cuda().occupancy(&blocks, common()["add"], 128, 48 << 10), Result::kSuccess);
  EXPECT_EQ(blocks, 4);
}

TEST_F(Launches, DimensionsAreChecked) {
  DevicePtr p = allocate(4096);
  int n = 1, x = 0;
  const auto result = [&](unsigned grid, unsigned bx, unsigned by, unsigned bz) {
    return try_launch(common()["add"], grid, bx, by, bz, 0, stream, {&p, &n, &x});
  };
  check(cuda().fill_8(p, 0, 4096, stream), "fill");
  EXPECT_EQ(result(0, 32, 1, 1), Result::kInvalidValue);
  EXPECT_EQ(result(1, 0, 1, 1), Result::kInvalidValue);
  EXPECT_EQ(result(1, 1025, 1, 1), Result::kInvalidValue);
  EXPECT_EQ(result(1, 32, 33, 1), Result::kInvalidValue);
  EXPECT_EQ(result(1, 1, 1, 65), Result::kInvalidValue);
  EXPECT_EQ(result(1, 1024, 1, 1), Result::kSuccess);
  EXPECT_EQ(cuda().launch(common()["add"], 1, 65536, 1, 32, 1, 1, 0, stream, nullptr, nullptr),
            Result::kInvalidValue);
}
TEST_F(Launches, ParametersAreReadAtTheCall) {
  const DevicePtr p = upload(std::vector<int>(32, 0), stream);
  Gate gate(stream);
  DevicePtr at = p;
  int n = 32, x = 5;
  check(try_launch(common()["add"], 1, 32, 1, 1, 0, stream, {&at, &n, &x}), "launch");
  at = 0, n = 0, x = 6;
  gate.open();
  EXPECT_EQ(download<int>(p, 32, stream), std::vector<int>(32, 5));
}
TEST_F(Launches, StructsOf4000BytesAreParameters) {
  const Module module(R"(struct Many { char before; int of[1000]; };
extern "C" __global__ void f(Many many, int* out) { out[threadIdx.x] = many.of[threadIdx.x * 9]; })");
  struct Many {
    char before;
    int of[1000];
  } many;
  for (int i = 0; i < 1000; ++i) many.of[i] = i;
  const DevicePtr out = allocate(400);
  run(module["f"], 1, 100, 0, stream, many, out);
  EXPECT_EQ(download<int>(out, 100, stream), numbers(100, [](int i) { return 9 * i; }));
}
TEST_F(Launches, DynamicSharedMemoryIsAskedFor) {
  const Module module(R"(extern "C" __global__ void f(int* out, int n) {
    extern __shared__ int held[];
    for (int i = threadIdx.x; i < n; i += blockDim.x) held[i] = i;
    __syncthreads();
    out[threadIdx.x] = held[n - 1 - threadIdx.x];
  })");
  DevicePtr out = allocate(4 * 32);
  int n = 25000;
  EXPECT_EQ(try_launch(module["f"], 1, 32, 1, 1, 100000, stream, {&out, &n}),
            Result::kInvalidValue);
  EXPECT_EQ(
      cuda().set_function_attribute(module["f"], FunctionAttribute::kMaxDynamicSharedBytes, 100000),
      Result::kSuccess);
  EXPECT_EQ(try_launch(module["f"], 1, 32, 1, 1, 100000, stream, {&out, &n}), Result::kSuccess);
  EXPECT_EQ(download<int>(out, 32, stream), numbers(32, [](int i) { return 24999 - i; }));
  EXPECT_EQ(cuda().set_function_attribute(module["f"], FunctionAttribute::kMaxDynamicSharedBytes,
                                          1 << 20),
            Result::kInvalidValue);
}
TEST_F(Launches, WithAConfiguration) {
  const DevicePtr p = upload(std::vector<int>(32, 1), stream);
  DevicePtr at = p;
  int n = 32, x = 1;
  void* parameters[] = {&at, &n, &x};
  const LaunchConfig config = {1, 1, 1, 32, 1, 1, 0, stream, nullptr, 0};
  EXPECT_EQ(cuda().launch_with(&config, common()["add"], parameters, nullptr), Result::kSuccess);
  EXPECT_EQ(download<int>(p, 32, stream), std::vector<int>(32, 2));
}

TEST_F(Kernels, LanesAreThreadsWithXFirst) {
  const Module module(R"(extern "C" __global__ void f(int* out) {
    const int t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    out[t] = __shfl_sync(0xffffffffu, t, 5);
  })");
  const DevicePtr out = allocate(64 * 4);
  std::vector<void*> parameters{const_cast<DevicePtr*>(&out)};
  check(try_launch(module["f"], 1, 4, 4, 4, 0, stream, parameters), "launch");
  EXPECT_EQ(download<int>(out, 64, stream), numbers(64, [](int i) { return i / 32 * 32 + 5; }));
}
TEST_F(Kernels, ShufflesDown) {
  EXPECT_EQ(block("out[t] = __shfl_down_sync(0xffffffffu, t, 3);", 32, 32),
            numbers(32, [](int i) { return i + 3 < 32 ? i + 3 : i; }));
  EXPECT_EQ(block("out[t] = __shfl_down_sync(0xffffffffu, t, 3, 8);", 32, 32),
            numbers(32, [](int i) { return i % 8 + 3 < 8 ? i + 3 : i; }));
}
TEST_F(Kernels, ShufflesUp) {
  EXPECT_EQ(block("out[t] = __shfl_up_sync(0xffffffffu, t, 2);", 32, 32),
            numbers(32, [](int i) { return i >= 2 ? i - 2 : i; }));
  EXPECT_EQ(block("out[t] = __shfl_up_sync(0xffffffffu, t, 1, 16);", 32, 32),
            numbers(32, [](int i) { return i % 16 ? i - 1 : i; }));
}
TEST_F(Kernels, ShufflesXor) {
  EXPECT_EQ(block("out[t] = __shfl_xor_sync(0xffffffffu, t, 5);", 32, 32),
            numbers(32, [](int i) { return i ^ 5; }));
  EXPECT_EQ(block("out[t] = __shfl_xor_sync(0xffffffffu, t, 8, 8);", 32, 32),
            numbers(32, [](int i) { return i / 8 % 2 ? i - 8 : i; }));
}
TEST_F(Kernels, ShufflesByIndex) {
  EXPECT_EQ(block("out[t] = __shfl_sync(0xffffffffu, t, 35);", 32, 32), std::vector<int>(32, 3));
  EXPECT_EQ(block("out[t] = __shfl_sync(0xffffffffu, t, 1, 4);", 32, 32),
            numbers(32, [](int i) { return i / 4 * 4 + 1; }));
  EXPECT_EQ(block("out[t] = int(__shfl_sync(0xffffffffu, (1LL << 40) + t, 2) >> 40) + "
                  "int(__shfl_sync(0xffffffffu, 2.5 * t, 2));",
                  32, 32),
            std::vector<int>(32, 6));
}
TEST_F(Kernels, HalvesOfAWarpShuffleOnTheirOwn) {
  EXPECT_EQ(block("if (t < 16) out[t] = __shfl_sync(0xffffu, t, 3);\n"
                  "else out[t] = __shfl_sync(0xffff0000u, t, 20);",
                  32, 32),
            numbers(32, [](int i) { return i < 16 ? 3 : 20; }));
}
TEST_F(Kernels, Votes) {
  EXPECT_EQ(block("out[t] = int(__ballot_sync(0xffffffffu, t % 3 == 0));", 32, 32)[0], 0x49249249);
  EXPECT_EQ(block("out[t] = __any_sync(0xffffffffu, t == 9) + 2 * __all_sync(0xffffffffu, t < 32) "
                  "+ 4 * __all_sync(0xffffffffu, t < 31) + 8 * __any_sync(0xffffffffu, t > 31);",
                  32, 32),
            std::vector<int>(32, 3));
}
TEST_F(Kernels, Matches) {
  EXPECT_EQ(block("out[t] = int(__match_any_sync(0xffffffffu, t / 8));", 32, 32),
            numbers(32, [](int i) { return static_cast<int>(0xffu << (i / 8 * 8)); }));
  EXPECT_EQ(block("int all; out[t] = int(__match_all_sync(0xffffffffu, 4, &all)); out[t] += all;",
                  32, 32),
            std::vector<int>(32, 0));
}
TEST_F(Kernels, WarpSums) {
  EXPECT_EQ(block("out[t] = __reduce_add_sync(0xffffffffu, t) + __reduce_max_sync(0xffffffffu, -t) "
                  "+ __reduce_min_sync(0xffffffffu, t - 5);",
                  32, 32),
            std::vector<int>(32, 496 + 0 - 5));
  EXPECT_EQ(
      block(
          "out[t] = int(__reduce_or_sync(0xffffffffu, 1u << t % 4) + "
          "__reduce_and_sync(0xffffffffu, 12u | t) + __reduce_xor_sync(0xffffffffu, unsigned(t)));",
          32, 32),
      std::vector<int>(32, 15 + 12 + 0));
}
TEST_F(Kernels, BarriersJoin) {
  EXPECT_EQ(block("out[t] = __syncthreads_count(t % 5 == 0) * 100 + (__syncthreads_and(t < 100) != "
                  "0) * 10 + (__syncthreads_or(t == 7) != 0);",
                  100, 100),
            std::vector<int>(100, 2011));
}
TEST_F(Kernels, ThreadsThatReturnedAreNotWaitedFor) {
  EXPECT_EQ(block("__shared__ int s[64];\nif (t >= 64) return;\ns[t] = "
                  "t;\n__syncthreads();\nout[t] = s[63 - t];",
                  96, 64),
            numbers(64, [](int i) { return 63 - i; }));
}
TEST_F(Kernels, AtomicsReturnWhatWasThere) {
  const std::vector<int> got = block(
      "if (t == 0) { out[0] = 0; out[1] = 100; out[2] = 0; out[3] = 5; out[4] = 1; out[5] = 0; "
      "out[6] = 0; out[7] = 0; }\n"
      "__syncthreads();\n"
      "atomicAdd(&out[0], t); atomicMin(&out[1], t + 3); atomicMax(&out[2], t);\n"
      "atomicCAS(&out[3], 5, 50); atomicExch(&out[4], 9); atomicOr(&out[5], 1 << t % 4);\n"
      "atomicInc((unsigned*)&out[6], 9u); atomicAdd((float*)&out[7], 0.5f);",
      64, 8);
  EXPECT_EQ(got, (std::vector<int>{2016, 3, 63, 50, 9, 15, 4, 0x42000000}));
}
TEST_F(Kernels, AtomicsOf16Bits) {
  EXPECT_EQ(block("unsigned short* p = (unsigned short*)out; if (t == 0) out[0] = "
                  "0x00070003;\n__syncthreads();\n"
                  "if (t == 1) out[1] = atomicCAS(p + 1, (unsigned short)7, (unsigned short)8);",
                  32, 2),
            (std::vector<int>{0x00070003 + 0x10000, 7}));
}
TEST_F(Kernels, AtomicsOf64Bits) {
  EXPECT_EQ(block("unsigned long long* p = (unsigned long long*)out; if (t == 0) { p[0] = 0; "
                  "*(double*)(p + 1) = 1.5; }\n__syncthreads();\n"
                  "atomicMax(p, (unsigned long long)t << 32); atomicAdd((double*)(p + 1), 0.25);",
                  32, 4),
            (std::vector<int>{0, 31, 0, 0x40230000}));
}
TEST_F(Kernels, TheLastBlockSeesAll) {
  const Module module(R"(extern "C" __global__ void f(int* parts, int* count, int* out) {
    __shared__ bool last;
    if (threadIdx.x == 0) {
      parts[blockIdx.x] = blockIdx.x;
      __threadfence();
      last = atomicAdd(count, 1) == int(gridDim.x) - 1;
    }
    __syncthreads();
    if (!last || threadIdx.x) return;
    int sum = 0;
    for (int i = 0; i < int(gridDim.x); ++i) sum += __ldcg(parts + i);
    *out = sum;
  })");
  const DevicePtr parts = allocate(400), count = upload(std::vector<int>{0}, stream),
                  out = allocate(4);
  run(module["f"], 100, 32, 0, stream, parts, count, out);
  EXPECT_EQ(download<int>(out, 1, stream), std::vector<int>{4950});
}
TEST_F(Kernels, IntegerIntrinsics) {
  const std::vector<int> got = block(
      "out[0] = __clz(1); out[1] = __clz(0); out[2] = __ffs(8); out[3] = __ffs(0); out[4] = "
      "__popc(0xff00ff);\n"
      "out[5] = int(__brev(1u)); out[6] = int(__umulhi(0x80000000u, 6u)); out[7] = __mulhi(-1, "
      "5);\n"
      "out[8] = int(__byte_perm(0x33221100u, 0x77665544u, 0x7520u)); out[9] = "
      "int(__funnelshift_l(0x80000000u, 1u, 1u));\n"
      "out[10] = int(__funnelshift_r(1u, 3u, 1u)); out[11] = __clzll(1LL << 40); out[12] = "
      "int(__umul64hi(1ULL << 63, 4ULL));",
      1, 13);
  EXPECT_EQ(got, (std::vector<int>{31, 32, 4, 0, 16, static_cast<int>(0x80000000u), 3, -1,
                                   0x77552200, 3, static_cast<int>(0x80000000u), 23, 2}));
}
TEST_F(Kernels, ConversionsToInt) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::nanf("");
  const std::vector<float> in{0.5f, 1.5f, -0.5f, -2.5f, 3e9f, -3e9f, inf, -inf, nan};
  const int most = std::numeric_limits<int>::max(), least = std::numeric_limits<int>::min();
  EXPECT_EQ((map<float, int>("float", "int", "__float2int_rn(x)", in)),
            (std::vector<int>{0, 2, 0, -2, most, least, most, least, 0}));
  EXPECT_EQ((map<float, int>("float", "int", "__float2int_rz(x)", in)),
            (std::vector<int>{0, 1, 0, -2, most, least, most, least, 0}));
  EXPECT_EQ((map<float, int>("float", "int", "(int)__float2uint_rn(x)", in)),
            (std::vector<int>{0, 2, 0, 0, static_cast<int>(3000000000u), 0, -1, 0, 0}));
}
TEST_F(Kernels, ConversionsToInt64) {
  const float inf = std::numeric_limits<float>::infinity();
  const long most = std::numeric_limits<long>::max(), least = std::numeric_limits<long>::min();
  EXPECT_EQ((map<float, long>("float", "long long", "__float2ll_rz(x)",
                              {1.5f, -2.5f, inf, -inf, std::nanf("")})),
            (std::vector<long>{1, -2, most, least, least}));
}
TEST_F(Kernels, SmallestAndLargestSkipNaN) {
  EXPECT_EQ((map<float, float>("float", "float", "fminf(x, 2.0f) + fmaxf(x, 1.0f)",
                               {std::nanf(""), 5.0f})),
            (std::vector<float>{3.0f, 7.0f}));
  EXPECT_EQ(
      (map<float, float>("float", "float", "min(x, 2.0f) + max(x, 1.0f)", {std::nanf(""), 5.0f})),
      (std::vector<float>{3.0f, 7.0f}));
}
TEST_F(Kernels, ExactMathematics) {
  std::vector<float> in;
  for (int i = 1; i < 500; ++i) in.push_back(static_cast<float>(i) * 0.37f);
  std::vector<float> root, product, quotient, round;
  for (float x : in) {
    root.push_back(std::sqrt(x)), product.push_back(std::fma(x, x, 1.0f));
    quotient.push_back(1.0f / x), round.push_back(std::rint(x));
  }
  EXPECT_EQ((map<float, float>("float", "float", "__fsqrt_rn(x)", in)), root);
  EXPECT_EQ((map<float, float>("float", "float", "__fmaf_rn(x, x, 1.0f)", in)), product);
  EXPECT_EQ((map<float, float>("float", "float", "__fdiv_rn(1.0f, x)", in)), quotient);
  EXPECT_EQ((map<float, float>("float", "float", "1.0f / x", in)), quotient);
  EXPECT_EQ((map<float, float>("float", "float", "rintf(x)", in)), round);
}
TEST_F(Kernels, ProductsAndSumsAreNotContracted) {
  EXPECT_EQ((map<float, float>("float", "float", "x * x - 1.0f", {1.0f + 0x1p-12f})),
            (std::vector<float>{0x1p-11f}));
}
TEST_F(Kernels, DenormalsAreKept) {
  EXPECT_EQ((map<float, float>("float", "float", "x * 0.5f", {0x1p-126f, 0x1p-140f})),
            (std::vector<float>{0x1p-127f, 0x1p-141f}));
}
TEST_F(Kernels, VectorsOf16Bytes) {
  const Module module(R"(extern "C" __global__ void f(const float4* a, float4* b) {
    const float4 x = a[threadIdx.x];
    b[threadIdx.x] = make_float4(x.w, x.z, x.y, x.x);
  })");
  const DevicePtr a = upload(std::vector<float>{1, 2, 3, 4, 5, 6, 7, 8}, stream), b = allocate(32);
  run(module["f"], 1, 2, 0, stream, a, b);
  EXPECT_EQ(download<float>(b, 8, stream), (std::vector<float>{4, 3, 2, 1, 8, 7, 6, 5}));
}
TEST_F(Kernels, ClocksGoOn) {
  EXPECT_EQ(block("long long a = clock64(); for (int i = 0; i < 100; ++i) out[0] = i; out[1] = "
                  "clock64() - a >= 0;",
                  1, 2)[1],
            1);
}

}  // namespace
}  // namespace vgpu_test
