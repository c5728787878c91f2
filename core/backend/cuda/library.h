// The vendor's libraries, loaded when they are first asked for: nothing is linked, so one binary
// runs with and without a GPU. The table of functions of each is made from its list
// (driver_functions.def, nvrtc_functions.def). Invariant: a table is complete or absent, and where
// it is absent one line says why and what to do.
#pragma once
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

struct DriverFunctions {
#define FUNCTION(member, symbol, parameters) \
  detail::FunctionOf<Result, void parameters>::Type member{#symbol};
#include "core/backend/cuda/driver_functions.def"
#undef FUNCTION
  std::string path;  // of the library
  int version = 0;   // of CUDA, as the driver counts: 13000
};
struct NvrtcFunctions {
#define FUNCTION(member, symbol, parameters) \
  detail::FunctionOf<NvrtcResult, void parameters>::Type member{#symbol};
#include "core/backend/cuda/nvrtc_functions.def"
#undef FUNCTION
  std::string path;
  int major = 0, minor = 0;
};

/// The driver, initialised. Throws UserError with why_no_driver() where there is none.
const DriverFunctions& driver();
/// Why driver() throws, in one line; empty where it does not.
const std::string& why_no_driver();
/// The run-time compiler; one whose code the driver can load, where there is a driver. Throws
/// UserError with why_no_nvrtc() where there is none.
const NvrtcFunctions& nvrtc();
const std::string& why_no_nvrtc();

/// An open library, or why it is not.
struct OpenedLibrary {
  void* handle = nullptr;
  std::string path, why;
};
/// Looks on the loader's path, then in `folders`; stays open.
OpenedLibrary open_library(const char* soname, const std::vector<std::string>& folders);
/// "13.0" of 13000.
std::string version_text(int version);

/// Folders beside the loader's own where libraries are looked for, in this order: those of
/// TESSERA_CUDA_LIBRARIES, then those into which pip installs the vendor's wheels.
std::vector<std::string> library_folders();

}  // namespace tessera::cuda
