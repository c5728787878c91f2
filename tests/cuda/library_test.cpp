// Finding the vendor's libraries, and the one line where they cannot be used. What a program says
// without a usable driver is asked of this program, run again beside libraries made for the test.
#include "core/backend/cuda/library.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "core/base/error.h"

namespace tessera::cuda {
namespace {

namespace fs = std::filesystem;

class Folder {
 public:
  Folder() {
    std::string name = fs::temp_directory_path() / "tessera-cuda-XXXXXX";
    if (!mkdtemp(name.data())) throw std::runtime_error("mkdtemp");
    path_ = name;
  }
  ~Folder() { fs::remove_all(path_); }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

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

std::string output_of(const std::string& command) {
  std::FILE* pipe = popen(command.c_str(), "r");
  std::string all;
  std::array<char, 256> part{};
  while (std::fgets(part.data(), part.size(), pipe)) all += part.data();
  const int status = pclose(pipe);
  return status == 0 ? all : fmt::format("{}(status {})", all, status);
}

TEST(CudaLibrary, LooksIntoNamedFoldersThenIntoWheels) {
  Folder folder;
  const fs::path wheel = folder.path() / "venv/lib/python3.12/site-packages/nvidia/cuda_nvrtc/lib";
  fs::create_directories(wheel);
  fs::create_directories(folder.path() / "venv/lib/python3.12/site-packages/nvidia/empty");
  Variable named("TESSERA_CUDA_LIBRARIES", "/first::/second");
  Variable active("VIRTUAL_ENV", folder.path() / "venv");
  const std::vector<std::string> folders = library_folders();
  ASSERT_GE(folders.size(), 3u);
  EXPECT_EQ(folders[0], "/first");
  EXPECT_EQ(folders[1], "/second");
  EXPECT_EQ(folders[2], wheel);
}

TEST(CudaLibrary, FindsTheWheelsOfThePythonOnPath) {
  Folder folder;
  const fs::path wheel = folder.path() / "env/lib/python3.11/site-packages/nvidia/cu13/lib";
  fs::create_directories(wheel);
  fs::create_directories(folder.path() / "env/bin");
  std::ofstream(folder.path() / "env/bin/python3") << "";
  Variable path("PATH", "/nowhere:" + (folder.path() / "env/bin").string());
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
std::string why_with(const Folder& folder, const std::string& text) {
  std::ofstream(folder.path() / "libcuda.c") << text;
  const std::string path = folder.path();
  const std::string made =
      output_of(fmt::format("cc -shared -fPIC -o {0}/libcuda.so.1 {0}/libcuda.c 2>&1", path));
  if (!made.empty()) return "no compiler: " + made;
  return output_of(
      fmt::format("LD_LIBRARY_PATH={}:$LD_LIBRARY_PATH {} --gtest_also_run_disabled_tests "
                  "--gtest_filter=CudaLibrary.DISABLED_PrintsWhy 2>&1",
                  path, fs::read_symlink("/proc/self/exe").string()));
}

/// C text of a driver whose functions all return `result`, but for the version.
std::string driver_text(int version, int result, const std::string& without = "") {
  std::string text =
      fmt::format("int cuDriverGetVersion(int* v) {{ *v = {}; return 0; }}\n", version);
#define FUNCTION(member, symbol, parameters)                                \
  if (#symbol != without && std::string(#symbol) != "cuDriverGetVersion" && \
      std::string(#symbol) != "cuGetErrorName")                             \
    text += fmt::format("int {}() {{ return {}; }}\n", #symbol, result);
#include "core/backend/cuda/driver_functions.def"
#undef FUNCTION
  return text + fmt::format(
                    "int cuGetErrorName(int e, const char** t) {{ *t = \"E{}\"; return 0; "
                    "}}\n",
                    result);
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
  Folder folder;
  expect_why(why_with(folder, driver_text(11080, 0)),
             "is for CUDA 11.8; install one for CUDA 12.0");
}
TEST(CudaLibrary, NamesAMissingFunction) {
  Folder folder;
  expect_why(why_with(folder, driver_text(12000, 0, "cuLaunchKernelEx")),
             "is for CUDA 12.0 and has no cuLaunchKernelEx");
}
TEST(CudaLibrary, SaysThatThereIsNoCard) {
  Folder folder;
  expect_why(why_with(folder, driver_text(13000, 100)), "the driver sees no card (E100)");
}
TEST(CudaLibrary, SaysThatADriverShowsNoCard) {
  Folder folder;
  expect_why(why_with(folder, driver_text(13000, 0)), "the driver sees no card");
}
TEST(CudaLibrary, TellsAStubFromADriver) {
  Folder folder;
  expect_why(why_with(folder, driver_text(13000, 34)), "is the toolkit's stub of the driver");
}
TEST(CudaLibrary, SaysThatADriverDoesNotLoad) {
  Folder folder;
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
