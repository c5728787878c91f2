#include "core/backend/cuda/cudnn.h"

#include <optional>
#include <utility>

#include "core/base/env.h"
#include "core/base/error.h"

namespace tessera::cuda {
namespace {

// Older ones want the sums of attention's gradient filled with zeros.
constexpr int kOldest = 90600;
constexpr const char* kVersion = "cudnnGetVersion";
constexpr const char* kLastError = "cudnnGetLastErrorString";

std::optional<CudnnFunctions> load_from(const OpenedLibrary& opened, std::string& why) {
  CudnnFunctions f;
  f.path = opened.path;
  const char* missing = nullptr;
#define FUNCTION(member, symbol, parameters) \
  if (const char* name = fill(f.member, opened.handle); name && !missing) missing = name;
#include "core/backend/cuda/cudnn_functions.def"
#undef FUNCTION
  f.last_error = reinterpret_cast<dnn::LastErrorFunction*>(address_in(opened.handle, kLastError));
  if (!f.last_error) missing = kLastError;
  void* version = address_in(opened.handle, kVersion);
  if (!version) missing = kVersion;
  if (version) f.version = int(reinterpret_cast<dnn::VersionFunction*>(version)());
  f.emulated = address_in(opened.handle, kEmulation) != nullptr;
  why = why_unfit(f.path, f.version, kOldest, missing, f.emulated);
  if (!why.empty()) return {};
  return f;
}

Loaded<CudnnFunctions> load() {
  if (!cudnn_is_wanted()) return {{}, "cuDNN is switched off; unset TESSERA_CUDA_LIBRARY_GRAPHS"};
  const OpenedLibrary opened = open_library("libcudnn.so.9", library_folders());
  std::string why = opened.why;
  if (opened.handle)
    if (auto table = load_from(opened, why)) return {std::move(table), {}};
  const bool old_driver = why_no_driver().empty() && driver().version < 13000;
  return {{},
          fmt::format("no cuDNN: {}; pip install nvidia-cudnn-cu{}, or set TESSERA_CUDA_LIBRARIES "
                      "to the folder of libcudnn.so.9",
                      why, old_driver ? 12 : 13)};
}

const Loaded<CudnnFunctions>& loaded() {
  static const auto& all = *new Loaded<CudnnFunctions>(load());
  return all;
}

}  // namespace

namespace dnn {

std::string name_of(Status status) {
  constexpr std::pair<Status, const char*> kNames[] = {
#define STATUS(name, vendor, value) {Status::name, #vendor},
#include "core/backend/cuda/cudnn_constants.def"
  };
  for (const auto& [known, name] : kNames)
    if (known == status) return name;
  return fmt::format("status {}", int(status));
}

void raise(Status status, const char* symbol) {
  throw BugError(fmt::format("cuda: {} failed with {}; report it", symbol, name_of(status)));
}

}  // namespace dnn

bool cudnn_is_wanted() { return env::get_int("TESSERA_CUDA_LIBRARY_GRAPHS", 1, 0, 1) == 1; }
const CudnnFunctions* cudnn() { return loaded().get(); }
const std::string& why_no_cudnn() { return loaded().why; }

}  // namespace tessera::cuda
