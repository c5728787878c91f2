// The system's C++ compiler: where it is, what machine it compiles for, and running it. Invariant:
// texts that are compiled with equal descriptions give the same code.
#pragma once
#include <string>
#include <vector>

namespace tessera::compiler {

struct Toolchain {
  std::string compiler;     // absolute path
  std::string description;  // of compiler, flags and processor: part of every cache key
};

/// `compiler`, or where that is empty TESSERA_COMPILE_CXX, or c++, g++ or clang++ by PATH. Throws
/// UserError where there is none.
Toolchain find_toolchain(const std::string& compiler);

/// Compiles `sources` (one C++ text each, at the same time) to the one shared object `object`, in
/// the folder `work`. Throws UserError with the compiler's message where it fails; the sources stay
/// in `work` then.
void compile_shared(const Toolchain& toolchain, const std::vector<std::string>& sources,
                    const std::string& work, const std::string& object);

/// Processors that this process may run on.
int available_cores();

}  // namespace tessera::compiler
