// libnvrtc.so.13 for machines without a GPU: the calls. Kernels are `extern "C" __global__`
// functions of a text that includes nothing. With VGPU_CHECK=1 in the environment every access of
// memory becomes a call into the virtual driver. Invariant: an option that is not known is an
// error.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "core/backend/cuda/driver_api.h"
#include "tests/vgpu/nvrtc/compiler.h"

namespace tessera::cuda {

#define FUNCTION(member, symbol, parameters) extern "C" NvrtcResult symbol parameters;
#include "core/backend/cuda/nvrtc_functions.def"
#undef FUNCTION

struct ProgramObject {
  std::string source, name;
  bool compiled = false;
  vgpu::Compilation result;
};

namespace {

constexpr std::array kArchitectures{"75",   "80",  "86",  "87",   "88",   "89",
                                    "90",   "90a", "100", "100a", "100f", "103",
                                    "103a", "110", "120", "120a", "121"};

NvrtcResult refuse(NvrtcResult result, const char* call, const std::string& why) {
  std::fprintf(stderr, "vgpu: %s: %s\n", call, why.c_str());
  return result;
}

// VGPU_FAIL=CALL[:NTH]: this call fails.
bool fails(const char* call) {
  const char* asked = std::getenv("VGPU_FAIL");
  const std::string text = asked ? asked : "";
  const size_t end = text.find(':');
  if (text.substr(0, end) != call) return false;
  static std::atomic<int> calls = 0;
  if (++calls != (end == text.npos ? 1 : std::atoi(text.c_str() + end + 1))) return false;
  return refuse(NvrtcResult::kInternalError, call, "fails, as VGPU_FAIL asks"), true;
}

struct Options {
  std::string architecture = "750";  // NVRTC's default is the oldest that it knows
  std::vector<std::string> definitions;
  std::string unknown;
};
bool take_architecture(const std::string& option, Options& to) {
  for (const char* key : {"--gpu-architecture=sm_", "-arch=sm_"})
    if (option.starts_with(key)) {
      const std::string number = option.substr(std::strlen(key));
      if (std::ranges::find(kArchitectures, number) == kArchitectures.end()) return false;
      to.architecture = std::to_string(std::atoi(number.c_str())) + "0";
      return true;
    }
  return false;
}
Options read_options(int count, const char* const* options) {
  static const std::set<std::string> kIgnored{"--fmad=false", "-fmad=false",
                                              "--std=c++20",  "-std=c++20",
                                              "-lineinfo",    "--generate-line-info"};
  Options read;
  for (int i = 0; i < count; ++i) {
    const std::string option = options[i];
    if (option.starts_with("-D"))
      read.definitions.push_back(option.substr(2));
    else if (option.starts_with("--define-macro="))
      read.definitions.push_back(option.substr(15));
    else if (!kIgnored.contains(option) && !take_architecture(option, read))
      read.unknown = option;
  }
  return read;
}

bool checked() {
  const char* check = std::getenv("VGPU_CHECK");
  return check && std::string(check) == "1";
}

// The library has every function of the table, or this does not link.
__attribute__((used)) void* const exported[] = {
#define FUNCTION(member, symbol, parameters) reinterpret_cast<void*>(&symbol),
#include "core/backend/cuda/nvrtc_functions.def"
#undef FUNCTION
};

}  // namespace

extern "C" {

NvrtcResult nvrtcVersion(int* major, int* minor) {
  return *major = 13, *minor = 0, NvrtcResult::kSuccess;
}

NvrtcResult nvrtcCreateProgram(ProgramHandle* program, const char* source, const char* name,
                               int num_headers, const char* const*, const char* const*) {
  if (fails(__func__)) return NvrtcResult::kInternalError;
  if (num_headers) return refuse(NvrtcResult::kInvalidInput, __func__, "headers are not emulated");
  *program = new ProgramObject{source, name && *name ? name : "default_program", false, {}};
  return NvrtcResult::kSuccess;
}
NvrtcResult nvrtcDestroyProgram(ProgramHandle* program) {
  if (!program || !*program) return refuse(NvrtcResult::kInvalidProgram, __func__, "no program");
  delete *program;
  *program = nullptr;
  return NvrtcResult::kSuccess;
}

NvrtcResult nvrtcCompileProgram(ProgramHandle program, int num_options,
                                const char* const* options) {
  if (fails(__func__)) return NvrtcResult::kInternalError;
  const Options read = read_options(num_options, options);
  program->compiled = true;
  if (!read.unknown.empty()) {
    program->result = {false, "nvrtc: error: unrecognized option " + read.unknown + " found\n", ""};
    return NvrtcResult::kInvalidOption;
  }
  program->result =
      vgpu::compile(program->source, program->name, read.architecture, read.definitions, checked());
  return program->result.good ? NvrtcResult::kSuccess : NvrtcResult::kCompilation;
}

NvrtcResult nvrtcGetProgramLogSize(ProgramHandle program, size_t* bytes) {
  return *bytes = program->result.log.size() + 1, NvrtcResult::kSuccess;
}
NvrtcResult nvrtcGetProgramLog(ProgramHandle program, char* log) {
  std::memcpy(log, program->result.log.c_str(), program->result.log.size() + 1);
  return NvrtcResult::kSuccess;
}
NvrtcResult nvrtcGetCUBINSize(ProgramHandle program, size_t* bytes) {
  *bytes = program->result.cubin.size();
  return program->result.good ? NvrtcResult::kSuccess : NvrtcResult::kInvalidProgram;
}
NvrtcResult nvrtcGetCUBIN(ProgramHandle program, char* cubin) {
  if (fails(__func__)) return NvrtcResult::kInternalError;
  std::memcpy(cubin, program->result.cubin.data(), program->result.cubin.size());
  return program->result.good ? NvrtcResult::kSuccess : NvrtcResult::kInvalidProgram;
}

// Only the virtual NVRTC has it: by this Tessera tells cubins of this emulation from others and
// from those of cards.
const char* vgpu_emulation() {
  static const std::string identity = vgpu::identity(checked());
  return identity.c_str();
}
}

}  // namespace tessera::cuda
