#include "core/backend/cuda/library.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string_view>

#include "core/base/env.h"
#include "core/base/error.h"

namespace tessera::cuda {
namespace {

namespace fs = std::filesystem;

constexpr int kOldestDriver = 12000;

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(':', begin), text.size());
    if (end > begin) parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

// Adds PACKAGES/nvidia/*/lib.
void add_wheels(const fs::path& packages, std::vector<std::string>& folders) {
  std::error_code ignored;
  for (const auto& wheel : fs::directory_iterator(packages / "nvidia", ignored))
    if (fs::is_directory(wheel.path() / "lib", ignored)) folders.push_back(wheel.path() / "lib");
}

// Adds those of PREFIX/lib/python3*/{site,dist}-packages.
void add_wheels_of_python(const fs::path& prefix, std::vector<std::string>& folders) {
  std::error_code ignored;
  for (const auto& python : fs::directory_iterator(prefix / "lib", ignored)) {
    if (!python.path().filename().string().starts_with("python3")) continue;
    for (const char* packages : {"site-packages", "dist-packages"})
      add_wheels(python.path() / packages, folders);
  }
}

// Where installations of Python keep their packages: the active virtual environment, the python3
// that a shell would start, both as named and as linked to, and the user's own packages.
std::vector<fs::path> python_prefixes() {
  std::vector<fs::path> prefixes;
  const auto add = [&](const fs::path& p) {
    if (!p.empty() && std::find(prefixes.begin(), prefixes.end(), p) == prefixes.end())
      prefixes.push_back(p);
  };
  add(variable("VIRTUAL_ENV"));
  for (const std::string& folder : split(variable("PATH"))) {
    std::error_code error;
    const fs::path python = fs::path(folder) / "python3";
    if (!fs::exists(python, error)) continue;
    add(fs::path(folder).parent_path());
    add(fs::canonical(python, error).parent_path().parent_path());
    break;
  }
  add("/usr/local");
  const std::string home = variable("HOME");
  if (!home.empty()) add(fs::path(home) / ".local");
  return prefixes;
}

OpenedLibrary open_at(const std::string& path) {
  OpenedLibrary o{dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL), path, {}};
  if (!o.handle) {
    o.why = dlerror();
  } else if (link_map* found = nullptr; dlinfo(o.handle, RTLD_DI_LINKMAP, &found) == 0) {
    o.path = found->l_name;  // where the loader found it
  }
  return o;
}

MemoryParts parts_of(void* library) {
  MemoryParts parts;
  void* allocated = dlsym(library, "vgpu_memory_allocated");
  void* freed = dlsym(library, "vgpu_memory_freed");
  if (!allocated || !freed) return parts;
  parts.allocated_address = reinterpret_cast<decltype(parts.allocated_address)>(allocated);
  parts.freed_address = reinterpret_cast<decltype(parts.freed_address)>(freed);
  return parts;
}

Result result_name(const DriverFunctions& f, Result error, std::string& name) {
  const char* text = nullptr;
  const Result r = f.error_name.result(error, &text);
  name = r == Result::kSuccess && text ? text : fmt::format("error {}", int(error));
  return r;
}

std::string why_not_started(const DriverFunctions& f, Result error) {
  std::string name;
  result_name(f, error, name);
  switch (error) {
    case Result::kNoDevice:
      return fmt::format("the driver sees no card ({}); see nvidia-smi and CUDA_VISIBLE_DEVICES",
                         name);
    case Result::kStubLibrary:
      return fmt::format(
          "{} is the toolkit's stub of the driver; install the card's driver, or "
          "take the stub's folder out of LD_LIBRARY_PATH",
          f.path);
    case Result::kSystemDriverMismatch:
      return fmt::format(
          "the driver's library {} and its kernel module have different versions "
          "({}); restart the machine",
          f.path, name);
    default: return fmt::format("the driver does not start: {}; see nvidia-smi", name);
  }
}

Loaded<DriverFunctions> load_driver() {
  constexpr const char* kLibrary = "libcuda.so.1";
  const OpenedLibrary opened = open_library(kLibrary, split(env::get("TESSERA_CUDA_LIBRARIES")));
  if (!opened.handle)
    return {{}, fmt::format("no driver: {}; install the card's driver", opened.why)};
  DriverFunctions f;
  f.path = opened.path;
  const char* missing = nullptr;
#define FUNCTION(member, symbol, parameters) \
  if (const char* name = fill(f.member, opened.handle); name && !missing) missing = name;
#include "core/backend/cuda/driver_functions.def"
#undef FUNCTION
  if (dlsym(opened.handle, "cuDriverGetVersion")) f.driver_version.result(&f.version);
  f.emulated = dlsym(opened.handle, kEmulation) != nullptr;
  if (missing || f.version < kOldestDriver)
    return {{},
            fmt::format("the driver is too old: {} is for CUDA {}{}; install one for CUDA {} or "
                        "later",
                        f.path, version_text(f.version),
                        missing ? fmt::format(" and has no {}", missing) : "",
                        version_text(kOldestDriver))};
  f.parts = parts_of(opened.handle);
  if (const Result r = f.init.result(0); r != Result::kSuccess) return {{}, why_not_started(f, r)};
  int count = 0;
  if (const Result r = f.device_count.result(&count); r != Result::kSuccess || count == 0)
    return {{}, why_not_started(f, r == Result::kSuccess ? Result::kNoDevice : r)};
  return {std::move(f), {}};
}

const Loaded<DriverFunctions>& loaded_driver() {
  static const Loaded<DriverFunctions>& loaded = *new Loaded<DriverFunctions>(load_driver());
  return loaded;
}

std::optional<NvrtcFunctions> load_nvrtc_of(const OpenedLibrary& opened, std::string& why) {
  NvrtcFunctions f;
  f.path = opened.path;
  const char* missing = nullptr;
#define FUNCTION(member, symbol, parameters) \
  if (const char* name = fill(f.member, opened.handle); name && !missing) missing = name;
#include "core/backend/cuda/nvrtc_functions.def"
#undef FUNCTION
  if (missing) {
    why = fmt::format("{} has no {}", f.path, missing);
    return {};
  }
  f.version(&f.major, &f.minor);
  if (void* emulation = dlsym(opened.handle, kEmulation))
    f.emulation = reinterpret_cast<const char* (*)()>(emulation)();
  if (why_no_driver().empty() && driver().emulated != !f.emulation.empty()) {
    why = fmt::format("{} does not compile for {}", f.path,
                      driver().emulated ? "the virtual GPU" : "cards");
    return {};
  }
  return f;
}

// A driver loads the code of compilers up to its own major version.
Loaded<NvrtcFunctions> load_nvrtc() {
  const int driver_version = why_no_driver().empty() ? driver().version : 0;
  const std::vector<std::string> folders = library_folders();
  std::string why;
  for (int major : {13, 12}) {
    const std::string soname = fmt::format("libnvrtc.so.{}", major);
    if (driver_version && major > driver_version / 1000) continue;
    const OpenedLibrary opened = open_library(soname.c_str(), folders);
    if (opened.handle) {
      if (auto table = load_nvrtc_of(opened, why)) return {std::move(table), {}};
    } else if (why.empty()) {
      why = opened.why;
    }
  }
  const int major = driver_version ? std::min(driver_version / 1000, 13) : 13;
  return {{},
          fmt::format("no run-time compiler: {}; pip install nvidia-cuda-nvrtc{}, or set "
                      "TESSERA_CUDA_LIBRARIES to the folder of libnvrtc.so.{}",
                      why, major == 12 ? "-cu12" : "", major)};
}

const Loaded<NvrtcFunctions>& loaded_nvrtc() {
  static const Loaded<NvrtcFunctions>& loaded = *new Loaded<NvrtcFunctions>(load_nvrtc());
  return loaded;
}

// What a program can do about a failed call, and whose fault it is.
struct Meaning {
  bool of_machine;
  const char* advice;
};
Meaning meaning(Result r) {
  switch (r) {
    case Result::kOutOfMemory: return {true, "the card has no memory left; use a smaller batch"};
    case Result::kEccUncorrectable:
      return {true, "the card's memory is faulty; see nvidia-smi and resume from a checkpoint"};
    case Result::kDeviceUnavailable:
    case Result::kNotPermitted:
    case Result::kSystemNotReady:
      return {true, "see nvidia-smi: the card is in use by another process, or not set up"};
    case Result::kLaunchTimeout:
      return {true, "a kernel ran longer than the system permits; use a card without a display"};
    case Result::kInvalidImage:
    case Result::kNoBinaryForGpu:
      return {true,
              "the code is for another card or a newer driver; update the driver, or remove "
              "the pack or the cache that it came from"};
    case Result::kIllegalAddress:
    case Result::kAssert:
    case Result::kHardwareStackError:
    case Result::kIllegalInstruction:
    case Result::kMisalignedAddress:
    case Result::kInvalidAddressSpace:
    case Result::kInvalidPc:
    case Result::kLaunchFailed:
      return {false,
              "a kernel that was launched before failed, and the process cannot use the "
              "card any more; resume from a checkpoint, and report the kernel that "
              "compute-sanitizer names"};
    default: return {false, "report it"};
  }
}

}  // namespace

std::string version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

std::string library_version_text(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version % 10000 / 100, version % 100);
}

std::string why_unfit(const std::string& path, int version, int oldest, const char* missing,
                      bool emulated) {
  if (missing || version < oldest)
    return fmt::format("{} is too old: version {}{}", path, library_version_text(version),
                       missing ? fmt::format(", without {}", missing) : "");
  if (why_no_driver().empty() && driver().emulated != emulated)
    return fmt::format("{} does not compute on {}", path,
                       driver().emulated ? "the virtual GPU" : "cards");
  return {};
}

void* address_in(void* library, const char* symbol) { return dlsym(library, symbol); }

// A file that is there and does not load (a library that it needs is missing) is the better reason.
OpenedLibrary open_library(const char* soname, const std::vector<std::string>& folders) {
  OpenedLibrary first = open_at(soname);
  if (first.handle) return first;
  for (const std::string& folder : folders) {
    const std::string path = folder + "/" + soname;
    std::error_code ignored;
    if (!fs::exists(path, ignored)) continue;
    OpenedLibrary o = open_at(path);
    if (o.handle) return o;
    first.why = o.why;
  }
  return first;
}

void raise(Result result, const char* symbol) {
  std::string name;
  const char* text = nullptr;
  result_name(driver(), result, name);
  if (driver().error_string.result(result, &text) != Result::kSuccess || !text) text = "no text";
  const Meaning m = meaning(result);
  std::string line = fmt::format("cuda: {} failed: {} ({}); {}", symbol, text, name, m.advice);
  if (m.of_machine) throw UserError(line);
  throw BugError(line);
}

void raise(NvrtcResult result, const char* symbol) {
  throw BugError(fmt::format("cuda: {} failed with {}; report it", symbol, int(result)));
}

const std::string& why_no_driver() { return loaded_driver().why; }
const DriverFunctions& driver() {
  static const DriverFunctions* const table = [] {
    const auto& loaded = loaded_driver();
    TESSERA_CHECK(loaded.table, "cuda: {}", loaded.why);
    return &*loaded.table;
  }();
  return *table;
}

const std::string& why_no_nvrtc() { return loaded_nvrtc().why; }
const NvrtcFunctions& nvrtc() {
  const auto& loaded = loaded_nvrtc();
  TESSERA_CHECK(loaded.table, "cuda: {}", loaded.why);
  return *loaded.table;
}

std::string emulation() {
  const bool some_driver = why_no_driver().empty();
  if (some_driver && !driver().emulated) return {};
  if (why_no_nvrtc().empty()) return nvrtc().emulation;
  return some_driver ? "without a compiler" : "";
}

std::vector<std::string> library_folders() {
  std::vector<std::string> folders = split(env::get("TESSERA_CUDA_LIBRARIES"));
  if (const std::string home = variable("HOME"); !home.empty())
    add_wheels(fs::path(home) / ".local/share/tessera/cuda", folders);
  for (const fs::path& prefix : python_prefixes()) add_wheels_of_python(prefix, folders);
  return folders;
}

}  // namespace tessera::cuda
