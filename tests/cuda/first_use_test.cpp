// The first error that a user of a card may see: `train` on machines that are set up badly says in
// one line what to do, and ends with status 1. It is run beside libraries made for the test.
#include <gtest/gtest.h>

#include <algorithm>

#include "core/backend/cuda/context.h"
#include "core/backend/cuda/library.h"
#include "tests/cuda/card.h"
#include "tests/cuda/made_library.h"

namespace tessera::cuda {
namespace {

namespace fs = std::filesystem;

class CudaFirstUse : public testing::Test {
 protected:
  void SetUp() override {
    if (!fs::exists(train_)) GTEST_SKIP() << "no " << train_;
  }
  void make(const std::string& soname, const std::string& text) {
    const std::string said = make_library(folder_, soname, text);
    if (!said.empty()) GTEST_SKIP() << "no compiler: " << said;
  }
  std::string train(const std::string& arguments, const std::string& environment = "") const {
    return output_of(fmt::format(
        "LD_LIBRARY_PATH={}:$LD_LIBRARY_PATH TESSERA_COMPILE_CACHE={} TESSERA_CUDA_LIBRARIES= {} "
        "{} --model mlp --steps 1 {} 2>&1",
        folder_.str(), folder_ / "cache", environment, train_.string(), arguments));
  }
  /// `train --device cuda` says one line with `parts`; without --device it trains on the CPU.
  void expect_line(const std::vector<std::string>& parts) const {
    const std::string said = train("--device cuda");
    for (const std::string& part : parts) expect_contains(said, part);
    EXPECT_TRUE(said.starts_with("train: cuda:0 cannot be used: ")) << said;
    EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
    EXPECT_TRUE(said.ends_with("\n(status 256)")) << said;  // as wait() says it: exit status 1
    const std::string without = train("");
    EXPECT_EQ(without.find("(status"), without.npos) << without;
  }
  const fs::path train_ = fs::read_symlink("/proc/self/exe").parent_path() / "train";
  TempFolder folder_;
};

TEST_F(CudaFirstUse, WithoutADriver) {
  make("libcuda.so.1", "int missing(void); int cuInit(void) { return missing(); }");
  expect_line({"no driver: ", "; install the card's driver"});
}
TEST_F(CudaFirstUse, WithTooOldADriver) {
  make("libcuda.so.1", driver_text(11080, 0));
  expect_line({"the driver is too old: ", "is for CUDA 11.8; install one for CUDA 12.0 or later"});
}
TEST_F(CudaFirstUse, WithoutACard) {
  make("libcuda.so.1", driver_text(13000, 100));
  expect_line({"the driver sees no card (E100); see nvidia-smi and CUDA_VISIBLE_DEVICES"});
}
TEST_F(CudaFirstUse, WithTheStubOfADriver) {
  make("libcuda.so.1", driver_text(13000, 34));
  expect_line({"is the toolkit's stub of the driver; install the card's driver"});
}

// A virtual GPU has no packs, so that it needs NVRTC.
TEST_F(CudaFirstUse, WithoutNvrtcAndPacks) {
  if (!why_no_driver().empty() || !driver().emulated) GTEST_SKIP() << "no virtual GPU";
  for (const char* soname : {"libnvrtc.so.13", "libnvrtc.so.12"}) make(soname, "int nothing;");
  const std::string said = train("--device cuda");
  expect_contains(
      said, "is in no pack for sm_90 beside the program, and there is no run-time compiler: ");
  expect_contains(said,
                  "pip install nvidia-cuda-nvrtc, or set TESSERA_CUDA_LIBRARIES to the folder of "
                  "libnvrtc.so.13\n(status 256)");
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
}

TEST_F(CudaFirstUse, WithoutTheVirtualGpusCards) {
  if (!why_no_driver().empty() || !driver().emulated) GTEST_SKIP() << "no virtual GPU";
  const std::string said = train("--device cuda", "VGPU_DEVICES=0");
  expect_contains(said,
                  "train: cuda:0 cannot be used: the driver sees no card (CUDA_ERROR_NO_DEVICE)");
  EXPECT_TRUE(said.ends_with("\n(status 256)")) << said;
}

// Each context takes some hundred MB of its card.
TEST_F(CudaFirstUse, ARankMakesAContextOnItsOwnCardAlone) {
  if (!why_no_driver().empty() || !driver().emulated) GTEST_SKIP() << "no virtual GPU";
  const std::string counters = folder_ / "counters";
  const std::string said = train("--device cuda:1", "VGPU_DEVICES=2 VGPU_COUNTERS=" + counters);
  EXPECT_EQ(said.find("(status"), said.npos) << said;
  expect_contains(output_of("cat " + counters), "call\tcuDevicePrimaryCtxRetain\t1\n");
}

// What users are asked for when they report something.
TEST_F(CudaFirstUse, VersionNamesTheLibraries) {
  make("libcuda.so.1", driver_text(12040, 0, "", 1));
  make("libnvrtc.so.12", nvrtc_text(12, 4));
  std::string said = train("--version");
  expect_contains(said, "train (Tessera) ");
  expect_contains(said, "\nCUDA driver for CUDA 12.4: " + (folder_ / "libcuda.so.1") + "\n");
  expect_contains(said, "\nNVRTC 12.4: " + (folder_ / "libnvrtc.so.12") + "\n");
  make("libcuda.so.1", driver_text(13000, 100));
  for (const char* soname : {"libnvrtc.so.13", "libnvrtc.so.12"}) make(soname, "int nothing;");
  said = train("--version");
  expect_contains(said, "\nCUDA: the driver sees no card (E100)");
  expect_contains(said, "\nCUDA: no run-time compiler: ");
  EXPECT_EQ(said.find("(status"), said.npos) << said;
}

}  // namespace
}  // namespace tessera::cuda
