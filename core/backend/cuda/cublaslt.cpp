#include "core/backend/cuda/cublaslt.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "core/base/env.h"
#include "core/base/error.h"

namespace tessera::cuda {
namespace {

constexpr int kOldest = 120000;
constexpr const char* kVersion = "cublasLtGetVersion";

std::optional<CublasLtFunctions> load_from(const OpenedLibrary& opened, std::string& why) {
  CublasLtFunctions f;
  f.path = opened.path;
  const char* missing = nullptr;
#define FUNCTION(member, symbol, parameters) \
  if (const char* name = fill(f.member, opened.handle); name && !missing) missing = name;
#include "core/backend/cuda/cublaslt_functions.def"
#undef FUNCTION
  void* version = address_in(opened.handle, kVersion);
  if (!version) missing = kVersion;
  if (version) f.version = int(reinterpret_cast<blas::VersionFunction*>(version)());
  why = why_unfit(f.path, f.version, kOldest, missing,
                  address_in(opened.handle, kEmulation) != nullptr);
  if (!why.empty()) return {};
  return f;
}

// A library of CUDA 13 needs a driver of CUDA 13.
Loaded<CublasLtFunctions> load() {
  if (!cublaslt_is_wanted())
    return {{}, "cuBLASLt is switched off; unset TESSERA_CUDA_LIBRARY_PRODUCTS"};
  const int newest = why_no_driver().empty() ? std::min(driver().version / 1000, 13) : 13;
  const std::vector<std::string> folders = library_folders();
  std::string why;
  for (int major = newest; major >= 12; --major) {
    const OpenedLibrary opened =
        open_library(fmt::format("libcublasLt.so.{}", major).c_str(), folders);
    std::string refused = opened.why;
    if (opened.handle)
      if (auto table = load_from(opened, refused)) return {std::move(table), {}};
    if (why.empty() || opened.handle) why = refused;
  }
  return {{},
          fmt::format("no cuBLASLt: {}; pip install nvidia-cublas{}, or set TESSERA_CUDA_LIBRARIES "
                      "to the folder of libcublasLt.so.{}",
                      why, newest == 12 ? "-cu12" : "", newest)};
}

const Loaded<CublasLtFunctions>& loaded() {
  static const auto& all = *new Loaded<CublasLtFunctions>(load());
  return all;
}

}  // namespace

namespace blas {

std::string name_of(Status status) {
  constexpr std::pair<Status, const char*> kNames[] = {
#define STATUS(name, vendor, value) {Status::name, #vendor},
#include "core/backend/cuda/cublaslt_constants.def"
  };
  for (const auto& [known, name] : kNames)
    if (known == status) return name;
  return fmt::format("status {}", int(status));
}

void raise(Status status, const char* symbol) {
  throw BugError(fmt::format("cuda: {} failed with {}; report it", symbol, name_of(status)));
}

}  // namespace blas

bool cublaslt_is_wanted() { return env::get_int("TESSERA_CUDA_LIBRARY_PRODUCTS", 1, 0, 1) == 1; }
const CublasLtFunctions* cublaslt() { return loaded().get(); }
const std::string& why_no_cublaslt() { return loaded().why; }

}  // namespace tessera::cuda
