// Libraries with the vendor's names that a test makes of C text, and this program run again beside
// them: what a program says and does on machines that are set up in other ways than this one.
#pragma once
#include <fmt/format.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <string>

#include "tests/support/temp_folder.h"

namespace tessera::cuda {

/// What a shell command prints; ends with its status where that is not 0.
inline std::string output_of(const std::string& command) {
  std::FILE* pipe = popen(command.c_str(), "r");
  std::string all;
  std::array<char, 256> part{};
  while (std::fgets(part.data(), part.size(), pipe)) all += part.data();
  const int status = pclose(pipe);
  return status == 0 ? all : fmt::format("{}(status {})", all, status);
}

/// Compiles C `text` to folder/soname; returns what a compiler said, "" where it is made.
inline std::string make_library(const TempFolder& folder, const std::string& soname,
                                const std::string& text) {
  folder.write(soname + ".c", text);
  return output_of(fmt::format("cc -shared -fPIC -o {0} {0}.c 2>&1", folder / soname));
}

/// A command that runs the disabled test `name` of this program beside the libraries in `folder`,
/// with `environment` ("A=b C=d") set.
inline std::string child_command(const TempFolder& folder, const std::string& name,
                                 const std::string& environment = "") {
  return fmt::format(
      "LD_LIBRARY_PATH={}:$LD_LIBRARY_PATH {} {} --gtest_also_run_disabled_tests "
      "--gtest_filter={} 2>&1",
      folder.str(), environment, std::filesystem::read_symlink("/proc/self/exe").string(), name);
}

/// C text of a driver for CUDA `version` whose functions all return `result`, but for the version.
/// With `cards` above 0 it starts, and has so many.
inline std::string driver_text(int version, int result, const std::string& without = "",
                               int cards = 0) {
  std::string text =
      fmt::format("int cuDriverGetVersion(int* v) {{ *v = {}; return 0; }}\n", version);
  if (cards) text += fmt::format("int cuDeviceGetCount(int* n) {{ *n = {}; return 0; }}\n", cards);
#define FUNCTION(member, symbol, parameters)                                \
  if (#symbol != without && std::string(#symbol) != "cuDriverGetVersion" && \
      std::string(#symbol) != "cuGetErrorName" &&                           \
      !(cards && std::string(#symbol) == "cuDeviceGetCount"))               \
    text += fmt::format("int {}() {{ return {}; }}\n", #symbol, result);
#include "core/backend/cuda/driver_functions.def"
#undef FUNCTION
  return text + fmt::format(
                    "int cuGetErrorName(int e, const char** t) {{ *t = \"E{}\"; return 0; "
                    "}}\n",
                    result);
}

/// C text of an NVRTC of this version, whose cubins are "VERSION:" and the text. It takes 0.1 s for
/// one, and adds a line to the file that CALLS names. `emulation`: that of the virtual GPU, or "".
inline std::string nvrtc_text(int major, int minor, const std::string& emulation = "") {
  std::string text = fmt::format(R"(
#define _DEFAULT_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#define MAJOR {}
#define MINOR {}
)",
                                 major, minor);
  text += R"(
int nvrtcVersion(int* major, int* minor) { return *major = MAJOR, *minor = MINOR, 0; }
int nvrtcCreateProgram(char** p, const char* source, const char* name, int n, void* h, void* i) {
  *p = malloc(strlen(source) + 20);
  return sprintf(*p, "%d.%d:%s", MAJOR, MINOR, source), 0;
}
int nvrtcDestroyProgram(char** p) { return free(*p), *p = 0, 0; }
int nvrtcCompileProgram(char* p, int n, void* options) {
  usleep(100000);
  FILE* calls = fopen(getenv("CALLS"), "a");
  fputs("called\n", calls);
  return fclose(calls), 0;
}
int nvrtcGetProgramLogSize(char* p, size_t* n) { return *n = 1, 0; }
int nvrtcGetProgramLog(char* p, char* log) { return *log = 0, 0; }
int nvrtcGetCUBINSize(char* p, size_t* n) { return *n = strlen(p), 0; }
int nvrtcGetCUBIN(char* p, char* cubin) { return memcpy(cubin, p, strlen(p)), 0; }
)";
  if (!emulation.empty())
    text += fmt::format("const char* vgpu_emulation() {{ return \"{}\"; }}\n", emulation);
  return text;
}

}  // namespace tessera::cuda
