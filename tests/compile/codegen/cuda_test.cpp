// The CUDA printer: every kernel it prints is compiled to a cubin for several architectures. No GPU
// is needed, so nothing runs.
#include <gtest/gtest.h>

#include "compile/codegen/generate.h"
#include "compile/codegen/samples.h"
#ifdef TESSERA_NVRTC
#include <nvrtc.h>
#endif

namespace tessera::test {
namespace {

using namespace compiler;

TEST(PrintCuda, RowsAreBlocksAndSumsAreTrees) {
  std::string text = print_cuda(softmax_body(100, 1000), "softmax");
  EXPECT_NE(text.find("extern \"C\" __global__ void softmax(char* const* p) {"), text.npos);
  EXPECT_NE(text.find("for (long row = blockIdx.x; row < 100; row += gridDim.x) {"), text.npos);
  EXPECT_NE(text.find("const float v1 = float(block_reduce<Max>(s1));"), text.npos) << text;
  EXPECT_NE(text.find("const float v4 = float(block_reduce<Sum>(s4));"), text.npos) << text;
}

TEST(PrintCuda, ElementsAreTakenInStridesOfTheGrid) {
  std::string text = print_cuda(bias_gelu_body(10, 30), "gelu");
  EXPECT_NE(text.find("for (long n = long(blockIdx.x) * blockDim.x + threadIdx.x; n < 300; "),
            text.npos)
      << text;
  EXPECT_EQ(text.find("block_reduce"), text.npos);
}

TEST(PrintCuda, SumsOverRowsAreLeftToOthers) {
  EXPECT_EQ(print_cuda(layer_norm_grad_body(10, 30), "norm"), "");
}

#ifdef TESSERA_NVRTC
// The log of a failed compilation; "" and the size of the cubin otherwise.
std::string compile_cuda(const std::string& text, const char* architecture, size_t* bytes) {
  nvrtcProgram program;
  if (nvrtcCreateProgram(&program, text.c_str(), "kernels.cu", 0, nullptr, nullptr) !=
      NVRTC_SUCCESS)
    return "nvrtcCreateProgram failed";
  std::string arch = std::string("--gpu-architecture=") + architecture;
  const char* options[] = {arch.c_str(), "--std=c++20", "--fmad=false"};
  std::string log;
  if (nvrtcCompileProgram(program, 3, options) != NVRTC_SUCCESS) {
    size_t size = 0;
    nvrtcGetProgramLogSize(program, &size);
    log.resize(size + 1);
    nvrtcGetProgramLog(program, log.data());
  } else {
    nvrtcGetCUBINSize(program, bytes);
  }
  nvrtcDestroyProgram(&program);
  return log;
}

TEST(PrintCuda, CompilesToCubins) {
  std::string text = prologue_cuda();
  int n = 0;
  auto add = [&](const Body& body) {
    std::string kernel = print_cuda(body, "k" + std::to_string(n++));
    EXPECT_NE(kernel, "") << to_string(body);
    text += kernel;
  };
  for (DType t : {kF32, kF64, kBF16, kF16})
    add(softmax_body(64, 1000, t)), add(bias_gelu_body(64, 768, t));
  add(layer_norm_body(64, 768)), add(adamw_body(100000));
  BodyBuilder b({64, 5, 7});
  InstrId x = b.load(7, kI32), y = b.load(7, kU8), z = b.load(4, kBool);
  InstrId wide = b.op("add", {b.cast(x, kI64), b.index(2)});
  b.store(b.op("mul", {x, b.cast(y, kI32)})), b.store(b.op("where", {z, wide, b.index(1)}));
  b.store(b.op("logical_or", {z, b.op("gt", {wide, b.constant(3, kI64)}, true)}, true));
  add(b.body);
  BodyBuilder r({64, 700});
  InstrId f = r.load(3), positive = r.op("gt", {f, r.constant(0.0)}, true);
  r.store(r.sum(positive, 2)), r.store(r.reduce(ReduceKind::kAny, positive, 2));
  r.store(r.reduce(ReduceKind::kMin, r.cast(positive, kI32), 2));
  r.store(r.reduce(ReduceKind::kProd, f, 2)), r.store(r.reduce(ReduceKind::kAll, positive, 2));
  add(r.body);
  for (const char* architecture : {"sm_80", "sm_90"}) {
    size_t bytes = 0;
    EXPECT_EQ(compile_cuda(text, architecture, &bytes), "") << text;
    EXPECT_GT(bytes, 10000u) << architecture;
  }
  size_t bytes = 0;
  EXPECT_NE(compile_cuda(text + "int nonsense = ;", "sm_90", &bytes), "");
}
#endif

}  // namespace
}  // namespace tessera::test
