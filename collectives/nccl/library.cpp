#include "collectives/nccl/library.h"

#include <dlfcn.h>

#include <cstdlib>

#include "core/base/error.h"

namespace tessera::nccl {
namespace {

constexpr const char* kLibrary = "libnccl.so.2";
constexpr int kOldest = 22703;  // splits of communicators that do not block, in a form that works

template <class T>
void find(void* library, const char* symbol, T& to) {
  to = reinterpret_cast<T>(dlsym(library, symbol));
}

cuda::Loaded<Functions> load() {
  if (!cuda::why_no_driver().empty()) return {{}, cuda::why_no_driver()};
  // Kernels of several communicators follow each other as the host made the calls, on all ranks
  // alike. Ranks do not capture together, so a capture must not register buffers with peers.
  setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", /*overwrite=*/0);
  setenv("NCCL_GRAPH_REGISTER", "0", /*overwrite=*/0);
  const cuda::OpenedLibrary opened = cuda::open_library(kLibrary, cuda::library_folders());
  if (!opened.handle)
    return {{},
            fmt::format("no NCCL: {}; pip install nvidia-nccl-cu13, or set TESSERA_CUDA_LIBRARIES "
                        "to the folder of {}",
                        opened.why, kLibrary)};
  Functions f;
  f.path = opened.path;
  const char* missing = nullptr;
#define FUNCTION(member, symbol, parameters)   \
  f.member.set(dlsym(opened.handle, #symbol)); \
  if (!dlsym(opened.handle, #symbol)) missing = #symbol;
#include "collectives/nccl/functions.def"
#undef FUNCTION
  f.has_windows = true;
#define FUNCTION(member, symbol, parameters)   \
  f.member.set(dlsym(opened.handle, #symbol)); \
  if (!dlsym(opened.handle, #symbol)) f.has_windows = false;
#include "collectives/nccl/window_functions.def"
#undef FUNCTION
  find(opened.handle, "ncclGetErrorString", f.error_string);
  find(opened.handle, "ncclGetLastError", f.last_error);
  if (!f.error_string || !f.last_error) missing = "ncclGetErrorString";
  if (!missing) f.get_version.result(&f.version);
  if (missing || f.version < kOldest)
    return {{},
            fmt::format("the NCCL of {} is too old: it {}; install 2.28", f.path,
                        missing ? fmt::format("has no {}", missing)
                                : fmt::format("is {}", cuda::library_version_text(f.version)))};
  const bool emulated = dlsym(opened.handle, "vgpu_emulation") != nullptr;
  if (emulated != cuda::driver().emulated)
    return {{},
            fmt::format("the NCCL of {} is not for {}; see TESSERA_CUDA_LIBRARIES", f.path,
                        emulated ? "cards" : "the virtual GPU")};
  return {std::move(f), {}};
}

const cuda::Loaded<Functions>& loaded() {
  static const auto& all = *new cuda::Loaded<Functions>(load());
  return all;
}

}  // namespace

void raise(Result result, const char* symbol) {
  throw BugError(fmt::format("{}: NCCL error {}", symbol, int(result)));
}

const Functions* functions() { return loaded().get(); }
const std::string& why_not() { return loaded().why; }

}  // namespace tessera::nccl
