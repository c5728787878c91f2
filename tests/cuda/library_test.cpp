// Finding the vendor's libraries, and the one line where they cannot be used. What a program says
// without a usable driver is asked of this program, run again beside libraries made for the test.
#include "core/backend/cuda/library.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "core/base/error.h"
#include "tests/cuda/made_library.h"

namespace tessera::cuda {
namespace {

namespace fs = std::filesystem;

class Variable {
 public:
  Variable(const char* name, const std::string& value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    setenv(name, value.c_str(), 1);
  }
  ~Variable() { before_.empty() ? unsetenv(name_) : setenv(name_, before_.c_str(), 1); }

 private:
  const char* name_;
  std::string before_;
};

TEST(CudaLibrary, LooksIntoNamedFoldersThenIntoWheels) {
  TempFolder folder;
  const fs::path wheel = folder / "venv/lib/python3.12/site-packages/nvidia/cuda_nvrtc/lib";
  fs::create_directories(wheel);
  fs::create_directories(folder / "venv/lib/python3.12/site-packages/nvidia/empty");
  const fs::path ours = folder / "home/.local/share/tessera/cuda/nvidia/cu13/lib";
  fs::create_directories(ours);
  Variable home("HOME", folder / "home");
  Variable named("TESSERA_CUDA_LIBRARIES", "/first::/second");
  Variable active("VIRTUAL_ENV", folder / "venv");
  const std::vector<std::string> folders = library_folders();
  ASSERT_GE(folders.size(), 4u);
  EXPECT_EQ(folders[0], "/first");
  EXPECT_EQ(folders[1], "/second");
  EXPECT_EQ(folders[2], ours);
  EXPECT_EQ(folders[3], wheel);
}

TEST(CudaLibrary, FindsTheWheelsOfThePythonOnPath) {
  TempFolder folder;
  const fs::path wheel = folder / "env/lib/python3.11/site-packages/nvidia/cu13/lib";
  fs::create_directories(wheel);
  fs::create_directories(folder / "env/bin");
  std::ofstream(folder / "env/bin/python3") << "";
  Variable path("PATH", "/nowhere:" + (folder / "env/bin"));
  Variable active("VIRTUAL_ENV", "");
  const std::vector<std::string> folders = library_folders();
  EXPECT_NE(std::find(folders.begin(), folders.end(), wheel), folders.end());
}

// Not a test by itself: those below run it in another process.
TEST(CudaLibrary, DISABLED_PrintsWhy) {
  std::printf("why: %s\n", why_no_driver().c_str());
  if (why_no_driver().empty()) return;
  try {
    driver();
  } catch (const UserError& e) {
    std::printf("error: %s\n", e.what());
  }
}

/// What this program prints where libcuda.so.1 is made of `text`.
std::string why_with(const TempFolder& folder, const std::string& text) {
  const std::string made = make_library(folder, "libcuda.so.1", text);
  if (!made.empty()) return "no compiler: " + made;
  return output_of(child_command(folder, "CudaLibrary.DISABLED_PrintsWhy"));
}

void expect_why(const std::string& output, const std::string& why) {
  if (output.starts_with("no compiler")) GTEST_SKIP() << output;
  const size_t at = output.find("why: ");
  ASSERT_NE(at, std::string::npos) << output;
  const std::string line = output.substr(at + 5, output.find('\n', at) - at - 5);
  EXPECT_NE(line.find(why), std::string::npos) << line;
  EXPECT_NE(output.find("error: cuda: " + line + "\n"), std::string::npos) << output;
}

TEST(CudaLibrary, SaysThatADriverIsTooOld) {
  TempFolder folder;
  expect_why(why_with(folder, driver_text(11080, 0)),
             "is for CUDA 11.8; install one for CUDA 12.0");
}
TEST(CudaLibrary, NamesAMissingFunction) {
  TempFolder folder;
  expect_why(why_with(folder, driver_text(12000, 0, "cuLaunchKernelEx")),
             "is for CUDA 12.0 and has no cuLaunchKernelEx");
}
TEST(CudaLibrary, SaysThatThereIsNoCard) {
  TempFolder folder;
  expect_why(why_with(folder, driver_text(13000, 100)), "the driver sees no card (E100)");
}
TEST(CudaLibrary, SaysThatADriverShowsNoCard) {
  TempFolder folder;
  expect_why(why_with(folder, driver_text(13000, 0)), "the driver sees no card");
}
TEST(CudaLibrary, TellsAStubFromADriver) {
  TempFolder folder;
  expect_why(why_with(folder, driver_text(13000, 34)), "is the toolkit's stub of the driver");
}
TEST(CudaLibrary, SaysThatADriverDoesNotLoad) {
  TempFolder folder;
  expect_why(why_with(folder, "int missing(void); int cuInit(void) { return missing(); }"),
             "no driver: ");
}

TEST(CudaLibrary, LoadsADriverWhereThereIsOne) {
  if (!why_no_driver().empty()) {
    EXPECT_EQ(why_no_driver().find('\n'), std::string::npos) << why_no_driver();
    EXPECT_THROW(driver(), UserError);
    GTEST_SKIP() << why_no_driver();
  }
  EXPECT_GE(driver().version, 12000);
}

TEST(CudaLibrary, LoadsARunTimeCompilerWhereThereIsOne) {
  if (!why_no_nvrtc().empty()) {
    EXPECT_EQ(why_no_nvrtc().find('\n'), std::string::npos) << why_no_nvrtc();
    EXPECT_THROW(nvrtc(), UserError);
    GTEST_SKIP() << why_no_nvrtc();
  }
  EXPECT_GE(nvrtc().major, 12);
}

}  // namespace
}  // namespace tessera::cuda
