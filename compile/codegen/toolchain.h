// The system's C++ compiler: finding it, describing it and the machine it compiles for, running it.
// Invariant: equal texts that are compiled under equal descriptions give the same code.
#pragma once
#include <string>
#include <vector>

namespace tessera::compiler {

struct Toolchain {
  std::string compiler;     // absolute path
  std::string description;  // of compiler, flags and processor: part of every cache key
};

/// Finds `compiler`, or if that is empty TESSERA_COMPILE_CXX, or else c++, g++ or clang++ in PATH.
/// Throws UserError where there is none.
Toolchain find_toolchain(const std::string& compiler);

/// Compiles `sources` (one C++ text each, in parallel) to the one shared object `object`, in the
/// folder `work`. Throws UserError with the compiler's message where it fails; the sources then
/// stay in `work`.
void compile_shared(const Toolchain& toolchain, const std::vector<std::string>& sources,
                    const std::string& work, const std::string& object);

/// The number of processors that this process may run on.
int available_cores();

}  // namespace tessera::compiler
