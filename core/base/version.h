// Which Tessera this is. The number stands in one place, the project() line of CMakeLists.txt.
#pragma once
#include <string>
#include <string_view>

namespace tessera {

/// "0.1.0"
std::string_view version();

/// What `program --version` prints: number, compiler, build type, instruction set in use. A bad
/// TESSERA_ISA is part of the text, not an error.
std::string version_text(std::string_view program);

}  // namespace tessera
