#include "core/base/version.h"

#include "core/base/error.h"
#include "core/base/isa.h"

namespace tessera {

std::string_view version() { return TESSERA_VERSION; }

std::string version_text(std::string_view program) {
  std::string isa;
  try {
    isa = cpu::isa_name(cpu::current_isa());
  } catch (const UserError& e) {
    isa = e.what();
  }
#ifdef __clang__
  constexpr const char* kCompiler = "Clang " __clang_version__;
#else
  constexpr const char* kCompiler = "GCC " __VERSION__;
#endif
  return fmt::format("{} (Tessera) {}\ncompiler: {}, {}\nkernels: {}", program, version(),
                     kCompiler, TESSERA_BUILD_TYPE, isa);
}

}  // namespace tessera
