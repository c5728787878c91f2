// Compiles CUDA C++ for the virtual GPU by the system's g++: a preprocessed text, made plain,
// behind device/emulate.h; a "cubin" is a shared object. Results are kept by the hash of all that
// they depend on in $VGPU_CACHE, by default a folder beside this library. Invariant: what is found
// there is what compiling would give.
#pragma once
#include <string>
#include <vector>

namespace vgpu {

struct Compilation {
  bool good = false;
  std::string log, cubin;
};
/// Tells what compilations depend on beside their arguments, as letters, digits and '-'.
std::string identity(bool checked);
/// `definitions`: NAME or NAME=VALUE; `architecture`: "900" for sm_90.
Compilation compile(const std::string& source, const std::string& name,
                    const std::string& architecture, const std::vector<std::string>& definitions,
                    bool checked);

}  // namespace vgpu
