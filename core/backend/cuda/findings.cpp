#include "core/backend/cuda/findings.h"

#include <dlfcn.h>
#include <link.h>

#include <filesystem>

#include "core/backend/cuda/context.h"
#include "core/backend/cuda/cublaslt.h"
#include "core/backend/cuda/cudnn.h"
#include "core/backend/cuda/library.h"
#include "core/backend/cuda/memory_ledger.h"
#include "core/base/error.h"

namespace tessera::cuda {
namespace {

constexpr auto kGood = Finding::Level::kGood, kAdvice = Finding::Level::kAdvice;

// Where the loader found it: the path that it was opened by may be a bare name.
std::string place_of(void* handle, const std::string& opened_by) {
  link_map* map = nullptr;
  const bool known = dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map && map->l_name[0];
  return known ? map->l_name : opened_by;
}
std::string place_of(const std::string& opened_by) {
  void* handle = dlopen(opened_by.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (!handle) return opened_by;
  const std::string place = place_of(handle, opened_by);
  dlclose(handle);
  return place;
}

// "no driver: libcuda.so.1: cannot open ..; install the card's driver": what comes after the last
// semicolon is what to do.
Finding missing(const std::string& why) {
  const size_t cut = why.rfind("; ");
  if (cut == why.npos) return {kAdvice, "CUDA: " + why, ""};
  return {kAdvice, "CUDA: " + why.substr(0, cut), why.substr(cut + 2)};
}

// The file that libcuda.so.1 links to has the driver's own version in its name.
Finding driver_finding() {
  if (!why_no_driver().empty()) return missing(why_no_driver());
  std::error_code unreadable;
  const std::string place = place_of(driver().path);
  const std::filesystem::path file = std::filesystem::canonical(place, unreadable);
  return {kGood, fmt::format("CUDA driver for CUDA {}: {}", version_text(driver().version),
                             unreadable ? place : file.string())};
}

Finding card_finding(int card) {
  const Properties& p = properties(card);
  return {kGood, fmt::format("cuda:{}: {}, {}, capability {}.{}", card, p.name,
                             bytes_text(p.total_bytes), p.major, p.minor)};
}

Finding compiler_finding() {
  if (!why_no_nvrtc().empty()) return missing(why_no_nvrtc());
  return {kGood,
          fmt::format("NVRTC {}.{}: {}", nvrtc().major, nvrtc().minor, place_of(nvrtc().path))};
}

Finding graphs_finding() {
  if (const CudnnFunctions* f = cudnn())
    return {kGood,
            fmt::format("cuDNN {}: {}", library_version_text(f->version), place_of(f->path))};
  if (why_no_driver().empty()) return missing(why_no_cudnn());
  return {kGood, why_no_cudnn().substr(0, why_no_cudnn().rfind("; "))};
}

Finding products_finding() {
  if (const CublasLtFunctions* f = cublaslt())
    return {kGood,
            fmt::format("cuBLASLt {}: {}", library_version_text(f->version), place_of(f->path))};
  if (why_no_driver().empty()) return missing(why_no_cublaslt());
  return {kGood, why_no_cublaslt().substr(0, why_no_cublaslt().rfind("; "))};
}

/// A library that is used where it is there, or that this version of Tessera does not use yet; a
/// user who plans for one that does wants to know.
struct Extra {
  const char* name;
  std::vector<const char*> sonames;  // newest first
  const char* version_symbol;
  bool by_pointer;      // int f(int*), else size_t f()
  const char* without;  // what is so without it; null: it is not used yet
};

// Both count 9.19.0 as 91900.
std::string version_of(void* handle, const Extra& library) {
  void* symbol = dlsym(handle, library.version_symbol);
  if (!symbol) return fmt::format("without {}", library.version_symbol);
  int number = 0;
  if (library.by_pointer)
    reinterpret_cast<int (*)(int*)>(symbol)(&number);
  else
    number = int(reinterpret_cast<size_t (*)()>(symbol)());
  return fmt::format("{}.{}.{}", number / 10000, number % 10000 / 100, number % 100);
}

Finding finding_of(const Extra& library, const std::vector<std::string>& folders) {
  std::string why;
  for (const char* soname : library.sonames) {
    const OpenedLibrary opened = open_library(soname, folders);
    if (opened.handle)
      return {kGood, fmt::format("{} {}: {}{}", library.name, version_of(opened.handle, library),
                                 place_of(opened.handle, opened.path),
                                 library.without ? "" : " (not used yet)")};
    if (why.empty()) why = opened.why;
  }
  return {kGood, fmt::format("{}: none ({}); {}", library.name, why,
                             library.without ? library.without : "nothing needs it yet")};
}

}  // namespace

std::vector<Finding> findings() {
  std::vector<Finding> all{driver_finding()};
  for (int card = 0; card < device_count(); ++card) all.push_back(card_finding(card));
  all.push_back(compiler_finding());
  all.push_back(products_finding());
  all.push_back(graphs_finding());
  const std::vector<std::string> folders = library_folders();
  const Extra libraries[] = {{"NCCL",
                              {"libnccl.so.2"},
                              "ncclGetVersion",
                              true,
                              "tensors of several ranks pass through the host without it"}};
  for (const Extra& library : libraries) all.push_back(finding_of(library, folders));
  return all;
}

}  // namespace tessera::cuda
