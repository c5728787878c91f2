// The vendor's libraries, loaded when they are first asked for: nothing is linked, so one binary
// runs with and without a GPU. The table of functions of each is made from its list
// (driver_functions.def, nvrtc_functions.def; cublaslt.h has its own). Invariant: a table is
// complete or absent, and where it is absent one line says why and what to do.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "core/backend/cuda/driver_api.h"

namespace tessera::cuda {

// Throws what a failed call means, naming `symbol`: UserError where the machine is the reason (its
// memory, its set-up), BugError where Tessera is (a kernel's fault, an argument).
[[noreturn]] void raise(Result result, const char* symbol);
[[noreturn]] void raise(NvrtcResult result, const char* symbol);

/// A function of a library. Calling it throws where it fails.
template <class R, class... A>
class Function {
 public:
  constexpr explicit Function(const char* symbol) : symbol_(symbol) {}
  void operator()(A... args) const {
    const R result = address_(args...);
    if (result != R::kSuccess) [[unlikely]]
      raise(result, symbol_);
  }
  /// Calls it and returns the result, for callers to whom some failures are an answer.
  R result(A... args) const { return address_(args...); }
  const char* symbol() const { return symbol_; }
  void set(void* address) { address_ = reinterpret_cast<R (*)(A...)>(address); }

 private:
  R (*address_)(A...) = nullptr;
  const char* symbol_;
};
namespace detail {
template <class R, class Signature>
struct FunctionOf;
template <class R, class... A>
struct FunctionOf<R, void(A...)> {
  using Type = Function<R, A...>;
};
}  // namespace detail

/// The address of `symbol` in an open library, or null.
void* address_in(void* library, const char* symbol);
/// Finds `function` in `library`; returns its symbol where that is missing.
template <class F>
const char* fill(F& function, void* library) {
  void* address = address_in(library, function.symbol());
  function.set(address);
  return address ? nullptr : function.symbol();
}
/// A function that only libraries of the virtual GPU (tests/vgpu) have.
inline constexpr const char* kEmulation = "vgpu_emulation";

/// What a virtual driver (tests/vgpu) has beside the vendor's functions: allocators tell it of the
/// parts that they cut blocks into, so that it knows bounds and lives of tensors. A real driver has
/// none, and these do nothing.
struct MemoryParts {
  Result (*allocated_address)(DevicePtr at, size_t bytes, const char* story) = nullptr;
  Result (*freed_address)(DevicePtr at) = nullptr;

  /// The `bytes` at `at` have a new owner; `story` says whose they are.
  void allocated(DevicePtr at, size_t bytes, const char* story) const {
    if (allocated_address && bytes) [[unlikely]]
      allocated_address(at, bytes, story);
  }
  /// Nothing that is submitted from now on uses the part that begins at `at`.
  void freed(DevicePtr at, size_t bytes) const {
    if (freed_address && bytes) [[unlikely]]
      freed_address(at);
  }
};

struct DriverFunctions {
#define FUNCTION(member, symbol, parameters) \
  detail::FunctionOf<Result, void parameters>::Type member{#symbol};
#include "core/backend/cuda/driver_functions.def"
#undef FUNCTION
  MemoryParts parts;
  std::string path;       // of the library
  int version = 0;        // of CUDA, as the driver counts: 13000
  bool emulated = false;  // the virtual GPU's (tests/vgpu)
};
struct NvrtcFunctions {
#define FUNCTION(member, symbol, parameters) \
  detail::FunctionOf<NvrtcResult, void parameters>::Type member{#symbol};
#include "core/backend/cuda/nvrtc_functions.def"
#undef FUNCTION
  std::string path;
  int major = 0, minor = 0;
  std::string emulation;  // the virtual GPU's: what its code depends on; empty for the vendor's
};

/// The driver, initialised. Throws UserError with why_no_driver() where there is none.
const DriverFunctions& driver();
/// Why driver() throws, in one line; empty where it does not.
const std::string& why_no_driver();
/// The run-time compiler; where there is a driver, one whose code it can load. Throws
/// UserError with why_no_nvrtc() where there is none.
const NvrtcFunctions& nvrtc();
const std::string& why_no_nvrtc();

/// Tells code for the virtual GPU from code for cards, which no other can run: empty for cards, and
/// where there is neither a driver nor a compiler.
std::string emulation();

/// An open library, or why it is not.
struct OpenedLibrary {
  void* handle = nullptr;
  std::string path, why;
};
/// Looks on the loader's path, then in `folders`; stays open.
OpenedLibrary open_library(const char* soname, const std::vector<std::string>& folders);
/// "13.0" of 13000.
std::string version_text(int version);

/// The functions of a library, or why there are none.
template <class Functions>
struct Loaded {
  std::optional<Functions> table;
  std::string why;
  const Functions* get() const { return table ? &*table : nullptr; }
};
/// Why the library at `path` is not used; empty where it is. `missing`: a function that it lacks,
/// or null; `emulated`: it is the virtual GPU's.
std::string why_unfit(const std::string& path, int version, int oldest, const char* missing,
                      bool emulated);
/// "9.19.0" of 91900, as the libraries count that are optional.
std::string library_version_text(int version);

/// Folders beside the loader's own where libraries are looked for, in this order: those of
/// TESSERA_CUDA_LIBRARIES; those of wheels from scripts/install-packages --cuda; those into which
/// pip installs the vendor's wheels for the Python that is active, on PATH or the user's.
std::vector<std::string> library_folders();

}  // namespace tessera::cuda
