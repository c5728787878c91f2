#include "core/base/nvtx.h"

#include <dlfcn.h>

#include <cstddef>
#include <mutex>
#include <string>

#include "core/base/env.h"
#include "core/base/log.h"

namespace tessera::nvtx {
namespace {

// ---- what NVTX's own headers declare (nvtxDetail/nvtxTypes.h)

using AnyFunction = void (*)();
using FunctionTable = AnyFunction**;  // of pointers to places, which a tool fills in

enum Module : int { kCore = 1, kCuda, kOpenCl, kCudaRuntime, kCore2, kSync, kNumModules };
constexpr unsigned kFunctionsOf[kNumModules] = {0, 16, 9, 15, 7, 16, 7};  // number 0 is none
constexpr unsigned kRangePushA = 9, kRangePop = 11;                       // of kCore
constexpr unsigned kMostFunctions = 16;

struct Callbacks {
  size_t struct_size;
  int (*module_table)(Module module, FunctionTable* table, unsigned* size);
};
struct VersionInfo {
  size_t struct_size;
  uint32_t version, reserved;
  void (*set_version_of_tool)(uint32_t version);
};
enum ExportTable : uint32_t { kCallbacks = 1, kVersionInfo = 3 };
using GetExportTable = const void* (*)(uint32_t which);
using InitializeTool = int (*)(GetExportTable);

// ---- our side

AnyFunction functions[kNumModules][kMostFunctions];
AnyFunction* places[kNumModules][kMostFunctions + 1];  // ends with a null pointer

int module_table(Module module, FunctionTable* table, unsigned* size) {
  if (module < kCore || module >= kNumModules) return 0;
  const unsigned n = kFunctionsOf[module];
  for (unsigned i = 1; i < n; ++i) places[module][i] = &functions[module][i];
  if (size) *size = n;
  if (table) *table = places[module];
  return 1;
}

const void* export_table(uint32_t which) {
  static constexpr Callbacks callbacks{sizeof(Callbacks), module_table};
  static constexpr VersionInfo version{sizeof(VersionInfo), 3, 0, [](uint32_t) {}};
  if (which == kCallbacks) return &callbacks;
  return which == kVersionInfo ? &version : nullptr;
}

// Empty where a tool listens, else why none does.
std::string why_not(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_LAZY);
  if (!library) return dlerror();
  const auto initialize =
      reinterpret_cast<InitializeTool>(dlsym(library, "InitializeInjectionNvtx2"));
  if (!initialize) return "it has no InitializeInjectionNvtx2";
  if (!initialize(export_table)) return "its tool did not start";
  return functions[kCore][kRangePushA] && functions[kCore][kRangePop]
             ? ""
             : "its tool does not ask for ranges";
}

}  // namespace

bool detail::attach() {
  static std::once_flag once;
  std::call_once(once, [] {
    const std::string path = env::get("NVTX_INJECTION64_PATH");
    const std::string why = path.empty() ? "no tool" : why_not(path);
    if (!path.empty() && !why.empty())
      logging::warn("NVTX_INJECTION64_PATH={}: {}; no ranges are written", path, why);
    state.store(why.empty() ? State::kOn : State::kOff, std::memory_order_release);
  });
  return state.load(std::memory_order_acquire) == State::kOn;
}

void push(const char* name) {
  reinterpret_cast<int (*)(const char*)>(functions[kCore][kRangePushA])(name);
}
void pop() { reinterpret_cast<int (*)()>(functions[kCore][kRangePop])(); }

}  // namespace tessera::nvtx
