// Libraries that are missing, too old, or fail at a call, as training meets them: it goes on in
// another way, or ends with one line and status 1, and never by a signal. Runs `train` on the
// virtual GPU (ctest vgpu_libraries); cuBLASLt and cuDNN are in products_test.cpp and
// graphs_test.cpp too.
#include <gtest/gtest.h>

#include <algorithm>

#include "core/backend/cuda/context.h"
#include "core/backend/cuda/library.h"
#include "tests/cuda/card.h"
#include "tests/cuda/made_library.h"

namespace tessera::cuda {
namespace {

namespace fs = std::filesystem;

class FailingLibraries : public testing::Test {
 protected:
  void SetUp() override {
    if (!fs::exists(programs_ / "train")) GTEST_SKIP() << "no " << programs_ / "train";
    if (!why_no_driver().empty() || !driver().emulated) GTEST_SKIP() << "no virtual GPU";
    if (device_count() < 2) GTEST_SKIP() << "2 cards are needed";
  }
  void make(const std::string& soname, const std::string& text) {
    ASSERT_EQ(make_library(folder_, soname, text), "");
  }
  /// What two ranks, or one, say in two steps.
  std::string train(int ranks, const std::string& environment,
                    const std::string& options = "--model mlp") const {
    const std::string launch =
        ranks == 1 ? "" : fmt::format("{} --nproc {} ", (programs_ / "tlaunch").string(), ranks);
    return output_of(fmt::format(
        "LD_LIBRARY_PATH={}:$LD_LIBRARY_PATH TESSERA_CUDA_LIBRARIES= TESSERA_TIMEOUT=10 {} "
        "timeout 100 {}{} {} --batch-size 4 --steps 2 --device cuda 2>&1",
        folder_.str(), environment, launch, (programs_ / "train").string(), options));
  }
  /// It has trained both steps.
  static void expect_trained(const std::string& said) {
    EXPECT_EQ(said.find("(status"), said.npos) << said;
    expect_contains(said, "step 2/2");
  }
  /// It ended with status 1, as wait() says it.
  static void expect_ended(const std::string& said, const std::string& line) {
    expect_contains(said, line);
    EXPECT_TRUE(said.ends_with("(status 256)")) << said;
  }
  static int64_t count(const std::string& text, const std::string& part) {
    int64_t n = 0;
    for (size_t at = 0; (at = text.find(part, at)) != text.npos; at += part.size()) ++n;
    return n;
  }
  const fs::path programs_ = fs::read_symlink("/proc/self/exe").parent_path();
  TempFolder folder_;
};

/// C text of an NCCL of `version` that has all functions Tessera needs, whose calls all fail.
std::string nccl_text(int version) {
  std::string text = fmt::format("int ncclGetVersion(int* v) {{ *v = {}; return 0; }}\n", version);
#define FUNCTION(member, symbol, parameters)    \
  if (std::string(#symbol) != "ncclGetVersion") \
    text += fmt::format("int {}() {{ return 3; }}\n", #symbol);
#include "collectives/nccl/functions.def"
#undef FUNCTION
  return text +
         "const char* ncclGetErrorString(int e) { return \"E\"; }\n"
         "const char* ncclGetLastError(void* c) { return \"\"; }\n";
}

/// C text of a library that has the functions of the one at `path`, but for windows of memory.
std::string nccl_without_windows(const std::string& path) {
  std::string text = "#include <dlfcn.h>\n", fill;
  const auto pass_on = [&](const std::string& symbol) {
    text += fmt::format(
        "__attribute__((visibility(\"hidden\"), used)) void* at_{0};\n"
        "__asm__(\".pushsection .text\\n.globl {0}\\n.type {0}, @function\\n{0}: jmp "
        "*at_{0}(%rip)\\n.popsection\");\n",
        symbol);
    fill += fmt::format("  at_{0} = dlsym(library, \"{0}\");\n", symbol);
  };
#define FUNCTION(member, symbol, parameters) pass_on(#symbol);
#include "collectives/nccl/functions.def"
#undef FUNCTION
  for (const char* symbol : {"ncclGetErrorString", "ncclGetLastError", "vgpu_emulation"})
    pass_on(symbol);
  return text + fmt::format(
                    "__attribute__((constructor)) static void fill(void) {{\n"
                    "  void* library = dlopen(\"{}\", RTLD_NOW | RTLD_LOCAL);\n{}}}\n",
                    path, fill);
}

TEST_F(FailingLibraries, NcclThatIsMissingOrTooOldLeavesTensorsToTheHost) {
  for (const auto& [text, why] :
       {std::pair<std::string, const char*>{"int missing(void); int f(void) { return missing(); }",
                                            "no NCCL: "},
        {nccl_text(22000), "is too old: it is 2.20.0; install 2.28"},
        {"int ncclGetVersion(int* v) { *v = 22809; return 0; }", "is too old: it has no nccl"},
        {nccl_text(22809), "is not for the virtual GPU"}}) {
    make("libnccl.so.2", text);
    const std::string said = train(2, "");
    expect_trained(said);
    EXPECT_EQ(count(said, "tensors on cuda pass through the host"), 1) << said;
    expect_contains(said, why);
  }
}

TEST_F(FailingLibraries, NcclWithoutWindowsReducesBuffers) {
  const std::string path = output_of(
      "for d in $(echo $LD_LIBRARY_PATH | tr : ' '); do ls $d/libnccl.so.2 2>/dev/null; done | "
      "head -1 | tr -d '\\n'");
  make("libnccl.so.2", nccl_without_windows(path));
  const std::string said = train(2, "TESSERA_LOG=info");
  expect_trained(said);
  EXPECT_EQ(count(said, "it is too old for windows of memory"), 1) << said;
}

TEST_F(FailingLibraries, ACallOfNcclThatFailsIsOneError) {
  for (const char* call :
       {"ncclGetUniqueId", "ncclCommInitRankConfig", "ncclCommSplit", "ncclCommGetAsyncError",
        "ncclAllReduce", "ncclGroupEnd", "ncclMemAlloc", "ncclCommWindowRegister",
        "ncclCommWindowDeregister", "ncclCommFinalize", "ncclCommDestroy"}) {
    SCOPED_TRACE(call);
    const std::string said = train(2, fmt::format("VGPU_NCCL=refuse:{}", call));
    const bool trains = std::string(call) == "ncclGetUniqueId" ||  // which is one way to have none
                        std::string(call) == "ncclMemAlloc" ||     // once, on one rank
                        std::string(call) == "ncclCommWindowRegister" ||
                        std::string(call) == "ncclCommWindowDeregister" ||
                        std::string(call) == "ncclCommFinalize" ||
                        std::string(call) == "ncclCommDestroy";
    if (trains)
      expect_trained(said);
    else
      expect_ended(said, call);
    const bool registers = std::string(call) == "ncclCommWindowRegister";
    EXPECT_EQ(count(said, "NCCL refuses windows of memory"), registers) << said;
  }
}

TEST_F(FailingLibraries, ProductsAndGraphsThatFailAreOurs) {
  for (const char* call : {"cublasLtCreate", "cublasLtMatmul:2"})
    expect_trained(train(1, fmt::format("VGPU_FAIL={}", call)));
  // The third execution is the second by its plan: the first by one from disk would be repeated.
  for (const char* call : {"cudnnCreate:1:1001", "cudnnBackendExecute:3:4000"})
    expect_trained(train(1, fmt::format("VGPU_FAIL={}", call),
                         "--model gpt-nano --set layers=1 --set dim=32 --seq-len 16"));
}

TEST_F(FailingLibraries, ACompilerThatFailsIsOneError) {
  const std::string cache = "TESSERA_COMPILE_CACHE=" + (folder_ / "cache");
  for (const char* call : {"nvrtcCreateProgram", "nvrtcCompileProgram", "nvrtcGetCUBIN"}) {
    const std::string said = train(1, fmt::format("{} VGPU_FAIL={}", cache, call));
    expect_ended(said, call);
    EXPECT_EQ(count(said, "cuda: "), 1) << said;
  }
  make("libnvrtc.so.13", "int nvrtcVersion(int* a, int* b) { return *a = 13, *b = 0; }");
  make("libnvrtc.so.12", "int nothing;");
  expect_ended(train(1, cache), "there is no run-time compiler: ");
}

}  // namespace
}  // namespace tessera::cuda
